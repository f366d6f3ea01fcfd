"""An engine's weights as identified by the peer that installs them: version, hash of its manifest, KV policy."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

import aiohttp

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import SPAN_KVS, SpanKv
from p2pcast.rollouts.result import Span
from p2pcast.sparse.budget_schedule import ALL_PAGES_NAME

HASH_BYTES: Final = 32
NO_MANIFEST: Final = bytes(HASH_BYTES)
REMEMBERED: Final = 4096
"""Number of versions whose hashes are kept, beyond those still listed by the peer, for plays that started with old
ones.
"""
ASK_S: Final = 10.0
"""Time limit in seconds for a request to the peer, which is on the same machine."""


SERVERS: Final = ("vllm", "sglang")
"""Kinds of install target that are servers: the peer names such an engine by its kind and URL."""


class UnnamedWeights:
    """Weights without a peer, for plays that are not handed in: every label becomes version 0.0."""

    salt: str | None = None

    async def span(self, label: str) -> Span:
        return Span(Version(0, 0), 0, 0, NO_MANIFEST, "recompute")


class Served(NamedTuple):
    """``staged``: the version to which the engine may switch next. ``node``: the peer's id, in hex. ``engine``: the
    engine's name at the peer.
    """

    version: Version
    manifest: bytes
    staged: Version | None
    node: str
    engine: str


class ServingEpoch(NamedTuple):
    """A time without a write to the engine's weights. ``id`` changes with each write; ``span`` has no position."""

    id: str
    span: Span


class EngineVersions:
    """``peer``: base URL of the peer's HTTP server. ``engine``: the engine's URL."""

    def __init__(self, http: aiohttp.ClientSession, peer: str, engine: str) -> None:
        self._http, self._peer = http, peer.rstrip("/")
        self._engine = engine.rstrip("/")
        self._manifests: dict[Version, bytes] = {}
        self.kv: SpanKv = "recompute"
        self.served: Served | None = None
        self.run: str | None = None
        """The run's id in hex, as reported by the peer."""
        self._serving_epoch: ServingEpoch | None = None
        self._schedules: dict[Version, bytes] = {}
        self._sparse = False
        """Whether the engine followed schedules, by the newest answer that contained the engine's version."""
        self._followed: dict[Version, bool] = {}
        """Version → whether the engine followed its schedule, as last seen while it served that version."""

    @property
    def salt(self) -> str | None:
        """Prefix-cache salt for a request that starts now; None unless the KV policy is ``salt``."""
        return str(self.served.version) if self.kv == "salt" and self.served is not None else None

    @property
    def sparse(self) -> bool:
        """Whether a request that starts now is sampled with sparse attention."""
        return self.served is not None and self.schedule(self.served.version) not in (None, ALL_PAGES_NAME)

    def schedule(self, version: Version) -> bytes | None:
        """The name of the schedule that the engine's attention followed while serving ``version``; None if dense."""
        return self._schedules.get(version) if self._followed.get(version, self._sparse) else None

    async def refresh(self) -> Served:
        """Return the version that the engine serves now. Raises RetryableError if no version is installed."""
        found = await self._ask()
        try:
            self._read(found)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError):
            raise RemoteError(f"the answer of {self._peer}/versions is malformed") from None
        if self.served is None:
            raise RetryableError(f"the engine {self._engine} has no version yet, says its peer at {self._peer}")
        return self.served

    def _read(self, found: Any) -> None:
        manifests = {Version.parse(text): bytes.fromhex(digest) for text, digest in found["manifests"].items()}
        if found["kv"] not in SPAN_KVS or any(len(digest) != HASH_BYTES for digest in manifests.values()):
            raise ValueError
        self.kv = found["kv"]
        run = found["run"] if isinstance(found.get("run"), str) else None
        if run != self.run:
            # The versions of a different run have different weights under the same names.
            self._manifests, self._schedules, self._followed, self._sparse = {}, {}, {}, False
        self.run = run
        self._manifests = dict(sorted((self._manifests | manifests).items())[-REMEMBERED:])
        # Peers of earlier releases do not report schedules.
        schedules = {Version.parse(text): bytes.fromhex(name) for text, name in found.get("schedules", {}).items()}
        if any(len(name) != HASH_BYTES for name in schedules.values()):
            raise ValueError
        self._schedules = dict(sorted((self._schedules | schedules).items())[-REMEMBERED:])
        engines, staged = found["engines"], found["staged"]
        name = next((name for kind in SERVERS if (name := f"{kind}:{self._engine}") in engines), self._engine)
        if name not in engines and len(engines) == 1:  # an engine with a custom name
            (name,) = engines
        text = engines.get(name)
        version = None if text is None else Version.parse(text)
        if not name.isprintable():
            raise ValueError
        self._serving_epoch = None
        if version is None or version not in self._manifests:
            self.served = None
            return
        manifest = self._manifests[version]
        # A peer that has not reached its engine yet, for example after a restart, does not know its kind of attention.
        self._sparse = name in found.get("sparse", ())
        self._followed = dict(sorted((self._followed | {version: self._sparse}).items())[-REMEMBERED:])
        staged = None if staged is None else Version.parse(staged)
        self.served = Served(version, manifest, staged, bytes.fromhex(found["node"]).hex(), name)
        epoch = found.get("stretches", {}).get(name)
        if epoch is not None and self.kv == "drain":
            self._serving_epoch = ServingEpoch(str(epoch), Span(version, 0, 0, manifest, "drain"))

    async def serving_epoch(self) -> ServingEpoch:
        """Return the current one. Raises LocalError if switches do not wait for requests, RetryableError during one."""
        await self.refresh()
        if self.kv != "drain":
            raise LocalError(
                f"the peer at {self._peer} switches the engine under running requests, so that their version is not "
                "known: start it with `p2pcast join --commit-safe-point drain`, or use --sampler generate or sglang"
            )
        if self._serving_epoch is None:
            raise RetryableError(f"the engine {self._engine} changes its weights now, says its peer at {self._peer}")
        return self._serving_epoch

    async def span(self, label: str) -> Span:
        """Return a span without position for a label of the engine's weights. Raises P2PCastError."""
        try:
            version = Version.parse(label)
        except UsageError:
            raise RetryableError(
                f"the engine answered from weights that no peer installed (its label is {label[:40]!r}): it was "
                "restarted, or its first install is under way"
            ) from None
        if version not in self._manifests:
            await self.refresh()
        elif self._sparse and version not in self._followed and version not in self._schedules:
            # The peer lists a manifest as soon as the hub does, but a schedule only once it has the version.
            with suppress(P2PCastError):
                await self.refresh()
        if version not in self._manifests:
            raise RetryableError(f"the peer at {self._peer} does not know version {version} of the engine")
        return Span(version, 0, 0, self._manifests[version], self.kv)

    async def _ask(self) -> Any:
        url = f"{self._peer}/versions"
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=ASK_S)) as answer:
                if answer.status == 404:
                    raise LocalError(f"{url} is not there: --peer must be a peer of this release")
                if answer.status != 200:
                    raise RetryableError(f"{url} answered {answer.status}")
                return await answer.json()
        except P2PCastError:
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RetryableError(f"{url} does not answer ({type(error).__name__})") from None
