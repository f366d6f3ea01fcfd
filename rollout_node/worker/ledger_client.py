"""The ledger's HTTP API, as a worker uses it.

Promises:

- A request that may be repeated is repeated for ever, with growing delays, until the ledger answers.
- Every request of this module may be repeated, because the ledger settles each (job, lease) once.

A refusal is an error with the ledger's own text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import aiohttp
import msgpack

from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.ground.private_random import uniform
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.probe_set import ProbeSet
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned
from p2pcast.transport.tls_errors import explain
from rollout_node.worker.engine_versions import Served

logger = logging.getLogger("p2pcast.worker")

MOST_AT_ONCE: Final = 32
"""Leases or results in one request."""
MAX_ANSWER_BYTES: Final = 160 * limits.MIB
"""Largest answer: as many jobs of the largest size as one request may lease, and a little more."""
REQUEST_S: Final = 30.0
"""Time limit of a request in seconds, besides the time for which the ledger was asked to wait."""
CHECK_S: Final = 10.0
CHECK_MOST_S: Final = 3600.0
"""Time limit of a check at a ledger that states none, and the longest that counts, in seconds."""
TURNS: Final = 2
"""Checks at the ledger for which a result may wait, in time limits of a check, its own included."""
RETRY_S, RETRY_MOST_S = 0.2, 15.0
HEARTBEAT_S: Final = 1.5
HEARTBEAT_LEAST_S, HEARTBEAT_MOST_S = 0.1, 600.0
"""Interval of heartbeats at a ledger that states none, and bounds of a stated one, in seconds."""
MSGPACK: Final = "application/x-msgpack"


class SessionLostError(RetryableError):
    """The ledger does not know the session: register again."""


class ConflictError(RefusedError):
    """The ledger has another body for this result, or an old session spoke."""


class UnfitError(RemoteError):
    """The ledger cannot take this request at all: malformed, or too large."""


class Session(NamedTuple):
    """``name``: under which the ledger knows the worker; another one than it stated if another worker has that name."""

    session: str
    worker: str
    name: str


@dataclass(frozen=True, slots=True)
class Lease:
    """``expires_in_s``: unless a heartbeat with new tokens extends it. ``latest_in_s``: the lease ends by then."""

    lease: bytes
    job: Job
    expires_in_s: float
    latest_in_s: float


@dataclass(frozen=True, slots=True)
class Leases:
    """``finished``: the run has ended. ``retry_s``: delay before the next request."""

    leases: Sequence[Lease]
    finished: bool
    retry_s: float


class Verdict(NamedTuple):
    """``reason`` and ``detail``: None for an accepted result."""

    job: str
    accepted: bool
    reason: str | None
    detail: str | None


class LedgerClient:
    """``url``: base URL of the ledger. ``bearer``: for http; ``tls``: for https, the context for the next connection.

    A server that cannot prove to be the ledger gets no byte of a request. It ends a worker that no ledger has answered
    yet: the address is wrong. Later the request is repeated, because another program may have taken the address over.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        bearer: str | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        uniform: Callable[[float, float], float] = uniform,
    ) -> None:
        self._http, self._url = http, url.rstrip("/")
        self._headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        self._tls = tls
        self._uniform = uniform
        self._answered = False
        """A ledger has answered."""
        self._check_s = CHECK_S
        """The ledger's time limit for the check of one result, in seconds."""
        self.heartbeat_s = HEARTBEAT_S
        """Interval that the ledger asks for, in seconds: the more workers there are, the longer it is."""

    async def register(self, **about: Any) -> Session:
        """``about``: name, price_usd_h, slots, task, task_hash, classes, leases that still run, and the session
        that was lost. Raises RefusedError.
        """
        found = await self._until_answered("/v1/workers", about)
        try:
            self._check_s = min(CHECK_MOST_S, max(0.0, float(found.get("check_s", CHECK_S))))
            self._take_interval(found)
            return Session(str(found["session"]), str(found["worker"]), str(found.get("name", about["name"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _malformed("/v1/workers") from None

    async def lease(self, session: str, slots: int, served: Served, wait_s: float) -> Leases:
        """Raises SessionLostError, RefusedError."""
        body = {
            "session": session,
            "slots": min(slots, MOST_AT_ONCE),
            "served": str(served.version),
            "manifest": served.manifest.hex(),
            "staged": None if served.staged is None else str(served.staged),
            "engine": {"node": served.node, "name": served.engine},
            "wait_s": wait_s,
        }
        found = await self._until_answered("/v1/lease", body, wait_s)
        try:
            leases = [
                Lease(
                    bytes(row["lease"]),
                    Job.from_bytes(row["job"]),
                    float(row["expires_in_s"]),
                    float(row["latest_in_s"]),
                )
                for row in found["leases"]
            ]
            return Leases(leases, bool(found["finished"]), max(0.0, float(found["retry_s"])))
        except (KeyError, TypeError, ValueError):
            raise _malformed("/v1/lease") from None

    async def heartbeat(self, session: str, tokens: dict[bytes, int]) -> dict[bytes, str]:
        """Lease → ``held``, ``abort`` or ``unknown``. Not repeated: the next heartbeat says more. Raises
        RetryableError, SessionLostError.
        """
        rows = [{"lease": lease.hex(), "tokens": count} for lease, count in tokens.items()]
        found = await self._ask("/v1/heartbeat", {"session": session, "leases": rows})
        try:
            self._take_interval(found)
            return {bytes.fromhex(row["lease"]): str(row["state"]) for row in found["leases"]}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _malformed("/v1/heartbeat") from None

    def _take_interval(self, answer: dict[str, Any]) -> None:
        """Raises TypeError, ValueError."""
        interval_s = float(answer.get("heartbeat_s", self.heartbeat_s))
        self.heartbeat_s = min(HEARTBEAT_MOST_S, max(HEARTBEAT_LEAST_S, interval_s))

    async def give_back(self, session: str, leases: Mapping[bytes, Returned]) -> None:
        """Unfinished leases return to the pool, each for its reason. Raises SessionLostError, RefusedError."""
        reasons = [
            {"lease": lease.hex(), "reason": one.reason.value, "detail": one.detail} for lease, one in leases.items()
        ]
        body = {"session": session, "leases": [lease.hex() for lease in leases], "reasons": reasons}
        await self._until_answered("/v1/return", body)

    async def hand_in(self, session: str, results: Sequence[Result]) -> list[Verdict]:
        """Raises SessionLostError, ConflictError, UnfitError, RefusedError."""
        body = msgpack.packb({"session": bytes.fromhex(session), "results": [result.to_bytes() for result in results]})
        # Other workers' checks have turns between these: a request that gives up early only sends everything again.
        found = await self._until_answered("/v1/results", body, TURNS * len(results) * self._check_s)
        try:
            return [
                Verdict(str(row["job"]), row["verdict"] == "accepted", row.get("reason"), row.get("detail"))
                for row in found["results"]
            ]
        except (KeyError, TypeError, AttributeError):
            raise _malformed("/v1/results") from None

    # -- probes

    async def take_probe(self, session: str, served: Served) -> ProbeSet | None:
        """The learner's probe set, if the ledger wants this version's scores. Not repeated. Raises P2PCastError."""
        body = {"session": session, "served": str(served.version), "manifest": served.manifest.hex()}
        found = await self._ask("/v1/probes/take", body)
        if not found:
            return None
        try:
            return ProbeSet.checked(found["sequences"])
        except (KeyError, TypeError, UsageError):
            raise _malformed("/v1/probes/take") from None

    async def report_probe(self, session: str, served: Served, probe_set: ProbeSet, scores: bytes) -> None:
        """``scores``: of ``served``, packed. Not repeated. Raises P2PCastError."""
        about = {"session": session, "served": str(served.version), "manifest": served.manifest.hex()}
        scored = {"set": probe_set.id.hex(), "engine": served.engine, "scores": scores.hex()}
        await self._ask("/v1/probes/report", about | scored)

    # -- requests

    async def _until_answered(self, path: str, body: Any, wait_s: float = 0.0) -> Any:
        delays = Backoff(RETRY_S, RETRY_MOST_S, self._uniform)
        while True:
            try:
                return await self._ask(path, body, wait_s)
            except SessionLostError:
                raise
            except RetryableError as error:
                logger.warning("%s; the request is repeated until the ledger answers", error)
            await asyncio.sleep(delays.next_s())

    async def _ask(self, path: str, body: Any, wait_s: float = 0.0) -> Any:
        """Raises P2PCastError."""
        packed = isinstance(body, bytes)
        data = body if packed else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": MSGPACK if packed else "application/json"}
        limit = aiohttp.ClientTimeout(total=REQUEST_S + wait_s)
        tls: ssl.SSLContext | bool = True if self._tls is None else self._tls()
        try:
            async with self._http.post(self._url + path, data=data, headers=headers, timeout=limit, ssl=tls) as answer:
                self._answered = True
                content = await _read(answer)
                if answer.status != 200:
                    raise _refusal(path, answer.status, content)
                if answer.content_type == MSGPACK:
                    return msgpack.unpackb(content)
                return json.loads(content)
        except P2PCastError:
            raise
        except aiohttp.ClientConnectorSSLError as error:
            raise self._tls_failure(error.os_error) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._tls_failure(error.certificate_error) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"the ledger at {self._url} does not answer ({type(error).__name__})") from None
        except (ValueError, msgpack.UnpackException):
            raise _malformed(path) from None

    def _tls_failure(self, error: Exception) -> P2PCastError:
        assert isinstance(error, ssl.SSLError)
        found = explain(error, f"the ledger at {self._url}", "compare the port with the ledger's address for https")
        return RetryableError(str(found)) if self._answered and isinstance(found, RefusedError) else found


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Raises RemoteError above the limit, before the rest arrives."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise RemoteError(f"the ledger's answer is larger than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _refusal(path: str, status: int, content: bytes) -> P2PCastError:
    try:
        said = str(json.loads(content)["error"])[:300]
    except (ValueError, KeyError, TypeError):
        said = "without a reason"
    text = f"the ledger refused {path} with status {status}: {said}"
    if status == 404:
        return SessionLostError(text)
    if status == 409:
        return ConflictError(text)
    if status in (400, 413):
        return UnfitError(text)
    if status in (401, 403):
        return RefusedError(text)
    return RetryableError(text)


def _malformed(path: str) -> RemoteError:
    return RemoteError(f"the ledger's answer to {path} is malformed")
