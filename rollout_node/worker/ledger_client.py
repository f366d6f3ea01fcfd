"""The ledger's HTTP API, as a worker uses it.

Guarantees:

- A request that may be repeated is repeated for ever, with growing delays, until the ledger answers.
- Every request of this module may be repeated, because the ledger settles each (job, lease) once.

A refusal is an error with the ledger's own text.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
from msgspec.structs import replace

from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.ground.private_random import uniform
from p2pcast.ledger_api import worker_api as api
from p2pcast.ledger_api.api_route import MAX_LIST, ApiRecord, ApiRoute, SessionLostError
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.probe_set import ProbeSet
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned
from p2pcast.transport.tls_errors import explain
from rollout_node.worker.engine_versions import Served

logger = logging.getLogger("p2pcast.worker")

Q = TypeVar("Q", bound=ApiRecord)
A = TypeVar("A", bound=ApiRecord)

MAX_ANSWER_BYTES: Final = 160 * limits.MIB
"""Largest answer: as many jobs of the largest size as one request may lease, with a small margin."""
REQUEST_S: Final = 30.0
"""Time limit for a request in seconds, in addition to the time that the ledger was asked to wait."""
RETRY_S, RETRY_MOST_S = 0.2, 15.0
CHECK_S: Final = 10.0
CHECK_MOST_S: Final = 3600.0
"""Time limit in seconds for a check if the ledger states none, and the longest that is accepted."""
TURNS: Final = 2
"""Number of checks, including its own, for which a result may wait at the ledger."""
HEARTBEAT_S: Final = 1.5
HEARTBEAT_LEAST_S, HEARTBEAT_MOST_S = 0.1, 600.0
"""Heartbeat interval in seconds if the ledger states none, and bounds for a stated one."""


@dataclass(frozen=True, slots=True)
class Leases:
    """``finished``: whether the run has ended. ``retry_s``: delay in seconds before the next request."""

    leases: Sequence[Leased]
    finished: bool
    retry_s: float


class LedgerClient:
    """``url``: base URL of the ledger. ``bearer``: for http. ``tls``: for https, returns the next connection's context.

    A server that cannot prove to be the ledger gets no byte of a request. Before any ledger has answered, it stops the
    worker, because the address is wrong. Later, the request is repeated, because another program may be at the address.
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
        """Whether a ledger has answered."""
        self._check_s = CHECK_S
        """The ledger's time limit for checking one result, in seconds."""
        self.heartbeat_s = HEARTBEAT_S
        """Heartbeat interval in seconds requested by the ledger; it grows with the number of workers."""

    async def register(self, about: api.Registration) -> api.Registered:
        """Register the worker. The answer includes the name that the ledger uses for it. Raises RefusedError."""
        found = await self.ask(api.REGISTER, about)
        self._check_s = min(CHECK_MOST_S, max(0.0, CHECK_S if found.check_s is None else found.check_s))
        self._take_interval(found.heartbeat_s)
        return replace(found, name=found.name or about.name)

    async def lease(self, session: bytes, slots: int, served: Served, wait_s: float) -> Leases:
        """Request leases. Raises SessionLostError, RefusedError."""
        asked = api.LeaseRequest(
            session,
            str(served.version),
            served.manifest,
            min(slots, MAX_LIST),
            None if served.staged is None else str(served.staged),
            api.EngineOfPeer(bytes.fromhex(served.node), served.engine),
            wait_s,
        )
        found = await self.ask(api.LEASE, asked, wait_s)
        leases = [Leased(o.lease, Job.from_bytes(o.job), o.expires_in_s, o.latest_in_s) for o in found.leases]
        return Leases(leases, found.finished, found.retry_s)

    async def heartbeat(self, session: bytes, tokens: Mapping[bytes, int]) -> dict[bytes, str]:
        """Renew leases. Returns lease → ``held``, ``abort`` or ``unknown``. Not repeated, because the next heartbeat is
        newer. Raises RetryableError, SessionLostError.
        """
        rows = [api.LeaseTokens(lease, count) for lease, count in tokens.items()]
        found = await self.ask_once(api.HEARTBEAT, api.HeartbeatRequest(session, rows))
        self._take_interval(found.heartbeat_s)
        return {row.lease: row.state for row in found.leases}

    def _take_interval(self, interval_s: float | None) -> None:
        if interval_s is not None:
            self.heartbeat_s = min(HEARTBEAT_MOST_S, max(HEARTBEAT_LEAST_S, interval_s))

    async def give_back(self, session: bytes, leases: Mapping[bytes, Returned]) -> None:
        """Return unfinished leases to the pool, each with its reason. Raises SessionLostError, RefusedError."""
        reasons = [api.LeaseReason(lease, one.reason.value, one.detail) for lease, one in leases.items()]
        await self.ask(api.RETURN, api.ReturnRequest(session, list(leases), reasons))

    async def hand_in(self, session: bytes, results: Sequence[Result]) -> Sequence[api.Settled]:
        """Hand in results. Raises SessionLostError, ConflictError, UnfitError, RefusedError."""
        asked = api.ResultsRequest(bytes(session), [result.to_bytes() for result in results])
        # Other workers' checks take turns with these; giving up early would only mean sending everything again.
        return (await self.ask(api.RESULTS, asked, TURNS * len(results) * self._check_s)).results

    # -- probes

    async def take_probe(self, session: bytes, served: Served) -> ProbeSet | None:
        """Get the learner's probe set if the ledger wants this version's scores. Not repeated. Raises P2PCastError."""
        asked = api.ServingEngine(session, str(served.version), served.manifest)
        found = await self.ask_once(api.TAKE_PROBE, asked)
        if found.sequences is None:
            return None
        try:
            return ProbeSet.checked(found.sequences)
        except UsageError as error:
            raise RemoteError(f"the ledger's answer to {api.TAKE_PROBE.path} is malformed: {error}") from None

    async def report_probe(self, session: bytes, served: Served, probe_set: ProbeSet, scores: bytes) -> None:
        """Report ``served``'s packed scores. Not repeated. Raises P2PCastError."""
        about = (session, str(served.version), served.manifest)
        asked = api.ReportProbeRequest(*about, probe_set.id, served.engine, scores.hex())
        await self.ask_once(api.REPORT_PROBE, asked)

    # -- requests

    async def ask(self, route: ApiRoute[Q, A], asked: Q, wait_s: float = 0.0) -> A:
        """Send a request until the ledger answers. ``wait_s``: seconds for which the ledger may hold the request.
        Raises SessionLostError, ConflictError, UnfitError, RefusedError, RemoteError.
        """
        delays = Backoff(RETRY_S, RETRY_MOST_S, self._uniform)
        while True:
            try:
                return await self.ask_once(route, asked, wait_s)
            except SessionLostError:
                raise
            except RetryableError as error:
                logger.warning("%s; the request is repeated until the ledger answers", error)
            await asyncio.sleep(delays.next_s())

    async def ask_once(self, route: ApiRoute[Q, A], asked: Q, wait_s: float = 0.0) -> A:
        """Send a request once. Raises P2PCastError."""
        body, headers = route.request(asked), self._headers | {"Content-Type": route.request_type}
        limit = aiohttp.ClientTimeout(total=REQUEST_S + wait_s)
        tls: ssl.SSLContext | bool = True if self._tls is None else self._tls()
        try:
            url = self._url + route.path
            async with self._http.post(url, data=body, headers=headers, timeout=limit, ssl=tls) as answer:
                self._answered = True
                return route.read_answer(await _read(answer), answer.status)
        except P2PCastError:
            raise
        except aiohttp.ClientConnectorSSLError as error:
            raise self._tls_failure(error.os_error) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._tls_failure(error.certificate_error) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"the ledger at {self._url} does not answer ({type(error).__name__})") from None

    def _tls_failure(self, error: Exception) -> P2PCastError:
        assert isinstance(error, ssl.SSLError)
        found = explain(error, f"the ledger at {self._url}", "compare the port with the ledger's address for https")
        return RetryableError(str(found)) if self._answered and isinstance(found, RefusedError) else found


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the answer. Raises RemoteError as soon as it exceeds the limit."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise RemoteError(f"the ledger's answer is larger than {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
