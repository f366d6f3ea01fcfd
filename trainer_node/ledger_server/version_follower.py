"""The ledger's knowledge of the run: its versions, with the hashes of their manifests and of their schedules of sparse
attention, the versions that engines serve, and the evicted nodes.

Guarantees: a version is known here only as the hub lists it; another run's hub is refused. Knowledge of engines ends
KNOWN_S after the hub's last answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import aiohttp

from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.ground.version import Version
from trainer_node.scheduling.served_versions import EngineId, KnownEngine

POLL_S = 0.5
"""Interval in seconds at which the ledger asks the hub."""
ASK_S = 10.0
KNOWN_S = 10.0
"""Seconds for which knowledge of engines counts: while the hub is away, engines go on to versions from their peers."""
MAX_ANSWER_BYTES = 4 * limits.MIB
HASH_BYTES = 32

Learnt = Callable[[Version, bytes, bytes | None], Awaitable[None]]
"""With a version, the hash of its manifest, and that of its schedule; None: the version carries no schedule."""


class VersionFollower:
    """``hub``: base URL of the hub's HTTP server. ``learnt``: called once with each new version and its hashes.
    ``moved``: called when an engine serves or stages another version. ``run``: hexadecimal id of the run, None until
    the first answer.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        hub: str,
        bearer: str | None,
        learnt: Learnt,
        moved: Callable[[], object],
        run: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http, self._url = http, f"{hub.rstrip('/')}/versions"
        self._headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        self._learnt, self._moved, self._clock = learnt, moved, clock
        self._known: set[Version] = set()
        self._engines: dict[EngineId, KnownEngine] = {}
        self._regions: dict[str, str] = {}
        self._engines_s = 0.0
        """Time of the request whose answer named the engines."""
        self._refreshing = asyncio.Lock()
        self.run_id = run
        self.evicted: frozenset[bytes] = frozenset()
        self.reached = False
        """Whether the newest request had an answer."""
        self.caught_up = False
        """Whether versions that are learnt from now on are new ones of the hub."""

    def engine(self, one: EngineId) -> KnownEngine | None:
        """None for an engine that the hub does not know, and while the hub is away."""
        return self._engines.get(one) if self._clock() - self._engines_s < KNOWN_S else None

    def region(self, node: str) -> str | None:
        """None for a node without engines, or unknown to the hub."""
        return self._regions.get(node)

    async def ensure(self, versions: Collection[Version]) -> None:
        """Ask the hub at once for versions that are not known: an engine may serve a version before the next request.
        Raises as ``refresh`` does.
        """
        if not self._known.issuperset(versions):
            async with self._refreshing:
                if not self._known.issuperset(versions):
                    await self.refresh()

    async def refresh(self) -> None:
        """Ask the hub once. Raises RetryableError, RemoteError, RefusedError, and what ``learnt`` raises."""
        self.reached, asked_s = False, self._clock()
        found = await self._ask()
        try:
            run = str(found["run"])
            engines = _engines(found["engines"])
            regions = {str(node): str(peer.get("region") or "") for node, peer in found["engines"].items()}
            evicted = frozenset(bytes.fromhex(node) for node in found["evicted"])
            manifests, schedules = _hashes(found["manifests"]), _hashes(found["schedules"])
        except (KeyError, TypeError, ValueError, AttributeError, UsageError):
            raise RemoteError(f"the answer of {self._url} is malformed") from None
        if any(len(digest) != HASH_BYTES for digest in (*manifests.values(), *schedules.values())):
            raise RemoteError(f"the answer of {self._url} is malformed: a hash has another length")
        if self.run_id is None:
            self.run_id = run
        if run != self.run_id:
            raise RefusedError(
                f"the hub at {self._url} is of run {run[:12]}, and this ledger is of run {self.run_id[:12]}: give the"
                " ledger a new state folder, or the address of its own hub"
            )
        self.evicted = evicted
        for version in sorted(manifests.keys() - self._known):
            await self._learnt(version, manifests[version], schedules.get(version))
        self._known, self.reached, self.caught_up = set(manifests), True, True
        before, self._engines, self._engines_s = self._engines, engines, asked_s
        self._regions = regions
        if engines != before:
            self._moved()

    async def _ask(self) -> Any:
        try:
            limit = aiohttp.ClientTimeout(total=ASK_S)
            async with self._http.get(self._url, headers=self._headers, timeout=limit) as answer:
                if answer.status == 401:
                    raise RetryableError(f"{self._url} asks for a bearer token: give --hub-bearer-file")
                if answer.status != 200:
                    raise RetryableError(f"{self._url} answered with status {answer.status}")
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    raise RemoteError(f"the answer of {self._url} is larger than {MAX_ANSWER_BYTES} bytes")
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"{self._url} does not answer ({type(error).__name__})") from None
        except ValueError:
            raise RemoteError(f"the answer of {self._url} is not JSON") from None


class HubKnowledge:
    """The ledger's knowledge of the run; none without a hub, and before ``follower`` is set."""

    def __init__(self) -> None:
        self.follower: VersionFollower | None = None

    async def learn(self, versions: Collection[Version]) -> None:
        """Ask the hub for versions that are not known. Raises RetryableError for whatever the hub answers: the caller
        is not at fault.
        """
        if self.follower is None:
            return
        try:
            await self.follower.ensure(versions)
        except P2PCastError as error:
            raise RetryableError(f"the ledger cannot ask the hub for these versions now: {error}") from None

    def engine(self, one: EngineId) -> KnownEngine | None:
        return None if self.follower is None else self.follower.engine(one)

    def region(self, node: str) -> str | None:
        return None if self.follower is None else self.follower.region(node)


def _engines(found: Any) -> dict[EngineId, KnownEngine]:
    """Raises what a document of another form raises."""
    return {
        EngineId(str(node), str(name)): KnownEngine(_version(version), _version(peer["staged"]))
        for node, peer in found.items()
        for name, version in peer["engines"].items()
    }


def _hashes(found: Any) -> dict[Version, bytes]:
    """Raises what a document of another form raises."""
    return {Version.parse(text): bytes.fromhex(digest) for text, digest in found.items()}


def _version(text: Any) -> Version | None:
    return None if text is None else Version.parse(text)
