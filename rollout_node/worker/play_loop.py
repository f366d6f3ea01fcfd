"""A worker's loops: lease, play, send heartbeats, hand in results.

Guarantees:

- Every lease ends in a result, a return to the ledger, or an abort that the ledger ordered.
- A play that raises, blocks, crashes or is forged by its own task costs only that lease.

After ``drain``, no lease is taken. Plays that end within the given time are handed in; the others are given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol

from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.ledger_api.api_route import MAX_LIST, ConflictError, SessionLostError, UnfitError
from p2pcast.ledger_api.worker_api import DeviceClasses, Leased, Registered, Registration
from p2pcast.process.log_context import about_job
from p2pcast.process.repeated_messages import TROUBLE_ENDED
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned, ReturnReason
from p2pcast.rollouts.top_logprobs import TOP_K
from p2pcast.tasks.task import Sampler
from rollout_node.worker.engine_versions import Served
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.lease_book import LeaseBook
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.returned_plays import EngineFaults, HeardSampler, returned_of, text_of

logger = logging.getLogger("p2pcast.worker")

LEASE_WAIT_S: Final = 5.0
"""Longest time in seconds that one request waits for leases; a drain waits for the request to return."""
LATE_S: Final = 60.0
"""Seconds for which a play continues after its lease has finally expired, because a late result may still count."""
FLUSH_S: Final = 10.0
"""Seconds for the last results and returns to reach the ledger once no plays are left."""
REQUEST_BYTES: Final = 16 * limits.MIB
"""Limit on the results in one request, in bytes: the ledger accepts 64 MiB, and one result is at most 16 MiB."""
SOON_S, LATER_S = 0.1, 30.0
"""Bounds in seconds on the delay that the ledger requests when it has no leases."""
REPEAT_S: Final = 0.5
"""Seconds without leasing after a job fails here again by its own fault: an older ledger leases it for ever."""
FAILED_KEPT: Final = 256
"""Number of jobs that failed by their own fault to remember."""
IDLE_S: Final = 1.0
"""Longest time in seconds that the worker waits for a change before it checks again."""


class PlaySampler(Protocol):
    def of_play(self, on_tokens: Callable[[int], None]) -> Sampler: ...


class WorkerWeights(Protocol):
    async def refresh(self) -> Served: ...
    def schedule(self, version: Version) -> bytes | None:
        """The schedule of the sparse attention with which the engine serves ``version``; None if it is dense."""


class WorkerProbes(Protocol):
    async def run(self, session: Callable[[], bytes | None]) -> None:
        """Run until cancelled. ``session``: returns the worker's session at the ledger, once it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """``price_usd_h``: this machine's price. ``device_class``: workers in the same class should be equally fast.
    ``drain_s``: seconds for plays to end after SIGTERM. ``guard_share``: the share of sparse-attention plays whose
    results include the ``guard_tokens`` most probable tokens of each position.
    """

    name: str
    slots: int = 8
    price_usd_h: float = 0.0
    device_class: str = ""
    drain_s: float = 30.0
    guard_share: float = 0.0
    guard_tokens: int = TOP_K


@dataclass(slots=True)
class _Outbox:
    results: list[Result] = field(default_factory=list)
    returns: dict[bytes, Returned] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.results or self.returns)


PlayTold = Callable[[Leased, float, Result | None, str | None], object]
"""Receives the lease of a play that has ended, its start in Unix seconds, and its result or why there is none."""


class PlayLoop:
    """``probes``: run alongside the plays. ``told``: called when a play has ended."""

    def __init__(
        self,
        config: WorkerConfig,
        player: JobPlayer,
        ledger: LedgerClient,
        sampler: PlaySampler,
        weights: WorkerWeights,
        probes: WorkerProbes | None = None,
        told: PlayTold = lambda *_: None,
    ) -> None:
        self._config, self._player, self._task, self._ledger = config, player, player.task, ledger
        self._sampler, self._weights, self._probes, self._told = sampler, weights, probes, told
        self._book = LeaseBook(config.slots)
        self._plays: dict[bytes, asyncio.Task[None]] = {}
        self._outbox = _Outbox()
        self._changed = Wakeup()
        self._session: Registered | None = None
        self._registering = asyncio.Lock()
        self._failures = Backoff(0.2, 30.0, uniform)
        self._engine_faults = EngineFaults()
        self._failed: dict[bytes, None] = {}
        """Jobs whose own faults made their plays fail here, the oldest first."""
        self._rests_until = 0.0
        self._leasing = True
        self._ended = False
        self.verdicts: Counter[str] = Counter()
        """Results by verdict or reason, plays that ``failed``, and leases that were ``returned``."""

    async def run(self) -> None:
        """Work until the run has ended or the worker is drained. Raises RefusedError if the ledger refuses it."""
        await self._registered(None)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._heartbeats(), name="heartbeats")]
                if self._probes is not None:
                    beside.append(group.create_task(self._probes.run(self._session_id), name="probes"))
                group.create_task(self._lease_until_end(group), name="leases")
                await self._hand_in_until_end()
                for each in beside:
                    each.cancel()
        finally:
            logger.info("results: %s", ", ".join(f"{n} {what}" for what, n in self.verdicts.items()) or "none")

    async def drain(self) -> None:
        """Take no more leases, finish the plays that end within ``drain_s``, and give back the others."""
        self._leasing = False
        self._changed.notify()
        logger.info("draining: %d plays have %g s to end", len(self._plays), self._config.drain_s)
        try:
            async with asyncio.timeout(self._config.drain_s):
                while not self._idle:
                    await self._changed.wait(IDLE_S)
        except TimeoutError:
            for play in list(self._plays.values()):
                play.cancel("drained")
        try:
            async with asyncio.timeout(FLUSH_S):
                while not (self._idle and self._ended):
                    await self._changed.wait(IDLE_S)
        except TimeoutError:
            logger.warning("the ledger did not take the last results within %g s", FLUSH_S)

    @property
    def _idle(self) -> bool:
        return not self._plays and not self._outbox

    # -- the session

    def _session_id(self) -> bytes | None:
        return None if self._session is None else self._session.session

    async def _registered(self, lost: Registered | None) -> Registered:
        """Return the session; register a new one if there is none or ``lost`` is the current one."""
        async with self._registering:
            if self._session is None or self._session is lost:
                before = self._session
                about = Registration(
                    name=self._config.name if before is None else before.name,
                    lost=None if before is None else before.session,
                    price_usd_h=self._config.price_usd_h,
                    slots=self._config.slots,
                    task=self._task.name,
                    task_hash=self._task.hash,
                    classes=DeviceClasses(self._config.device_class),
                    # All other leases return to the pool: their answers were lost, or an earlier process had them.
                    leases=[*self._book.running, *(result.lease for result in self._outbox.results)],
                )
                self._session = await self._ledger.register(about)
                logger.info("registered at the ledger as %s, %s", self._session.name, self._session.worker.hex())
                if before is not None and self._session.name != before.name:
                    logger.warning("another worker is named %s: give each worker a --name of its own", before.name)
            return self._session

    # -- leases

    async def _lease_until_end(self, group: asyncio.TaskGroup) -> None:
        delays, loop = Backoff(0.2, 5.0, uniform), asyncio.get_running_loop()
        while self._leasing:
            rests_s = self._rests_until - loop.time()
            if not self._book.free or rests_s > 0:
                await self._changed.wait(min(IDLE_S, rests_s) if rests_s > 0 else IDLE_S)
                continue
            session = await self._registered(None)
            try:
                served = await self._weights.refresh()
                found = await self._ledger.lease(session.session, self._book.free, served, LEASE_WAIT_S)
            except RefusedError:
                raise
            except (RetryableError, RemoteError) as error:
                logger.warning("no leases for now: %s", error)
                if isinstance(error, SessionLostError):
                    await self._registered(session)
                await self._changed.wait(delays.next_s())
                continue
            delays.reset()
            self._take(found.leases, group)
            if found.finished:
                logger.info("the ledger says that the run has ended")
                break
            if not found.leases and self._leasing:
                await self._changed.wait(min(LATER_S, max(SOON_S, found.retry_s)))
        self._leasing = False
        self._ended = True
        self._changed.notify()

    def _take(self, leases: Any, group: asyncio.TaskGroup) -> None:
        unfit = {lease.lease for lease in leases if not self._fits(lease.job)}
        fitting = [lease for lease in leases if self._leasing and lease.lease not in unfit]
        taken = set(self._book.add(lease.lease for lease in fitting))
        for lease in leases:
            if lease.lease in taken:
                name = f"play {lease.job.job.hex()[:8]}"
                self._plays[lease.lease] = group.create_task(self._play(lease), name=name)
            else:
                why = ReturnReason.UNFIT if lease.lease in unfit else ReturnReason.DRAINED
                self._give_back(lease.lease, Returned(why))

    def _fits(self, job: Job) -> bool:
        if job.task_hash == self._task.hash:
            return True
        logger.warning("a job of task %s with another hash was leased, and goes back: compare the code", job.task)
        return False

    def _give_back(self, lease: bytes, why: Returned) -> None:
        self._outbox.returns[lease] = why
        self.verdicts["returned"] += 1
        self._changed.notify()

    # -- plays

    async def _play(self, lease: Leased) -> None:
        """Play one lease. It is cancelled by an abort or a drain."""
        with about_job(lease.job.job):
            await self._play_about(lease)

    async def _play_about(self, lease: Leased) -> None:
        book, job, result = self._book, lease.job, None
        began_s, why, returned = time.time(), "cancelled", Returned(ReturnReason.DRAINED)
        sampler = HeardSampler(self._sampler.of_play(lambda count: book.sampled(lease.lease, count)))
        until = asyncio.timeout(lease.latest_in_s + LATE_S)
        try:
            async with until:
                result = await self._player.result(sampler, lease, self._weights.schedule)
            self._failures.reset()
            self._engine_faults.answered()
            self._rests_until = 0.0
        except Exception as error:
            self.verdicts["failed"] += 1
            unexpected = None if isinstance(error, P2PCastError | TimeoutError) else error
            why, returned = text_of(error), returned_of(error, sampler, out_of_time=until.expired())
            returned = self._engine_faults.judged(job.job, returned, sampler.failed)
            logger.warning(
                "a play of job %s failed, and its lease goes back (%s): %s",
                *(job.job.hex(), returned.reason.value, why),
                exc_info=unexpected,
            )
            self._rest(job.job, returned.reason)
        finally:
            self._plays.pop(lease.lease, None)
            self._told(lease, began_s, result, None if result is not None else why)
            if book.end(lease.lease):
                if result is None:
                    self._give_back(lease.lease, returned)
                else:
                    self._outbox.results.append(result)
                    book.result_waits(lease.lease)
            self._changed.notify()

    def _rest(self, job: bytes, why: ReturnReason) -> None:
        """Pause leasing for a moment, unless other jobs can probably be played."""
        rests_s = self._failures.next_s() if not why.fails_job else REPEAT_S if job in self._failed else 0.0
        if why.fails_job:
            self._failed[job] = None
            if len(self._failed) > FAILED_KEPT:
                del self._failed[next(iter(self._failed))]
        self._rests_until = max(self._rests_until, asyncio.get_running_loop().time() + rests_s)

    # -- heartbeats

    async def _heartbeats(self) -> None:
        reached = True
        while True:
            session = await self._registered(None)
            await asyncio.sleep(self._ledger.heartbeat_s)
            try:
                states = await self._ledger.heartbeat(session.session, self._book.tokens())
            except SessionLostError:
                await self._registered(session)
            except RefusedError:
                raise
            except (RetryableError, RemoteError) as error:
                logger.warning("heartbeats do not reach the ledger: %s", error)
                reached = False
            else:
                if not reached:
                    logger.info("heartbeats reach the ledger again", extra=TROUBLE_ENDED)
                reached = True
                for lease in self._book.apply_states(states):
                    self.verdicts["aborted"] += 1
                    if (play := self._plays.get(lease)) is not None:
                        play.cancel("aborted by the ledger")

    # -- results and returns

    async def _hand_in_until_end(self) -> None:
        delays = Backoff(0.2, 15.0, uniform)
        while not (self._ended and self._idle):
            if not self._outbox:
                await self._changed.wait(IDLE_S)
                continue
            session = await self._registered(None)
            try:
                await self._return(session, dict(islice(self._outbox.returns.items(), MAX_LIST)))
                await self._hand_in(session, _one_request(self._outbox.results))
            except RefusedError:
                raise
            except (RetryableError, RemoteError) as error:
                logger.warning("results wait: %s", error)
                if isinstance(error, SessionLostError):
                    await self._registered(session)
                await asyncio.sleep(delays.next_s())
            else:
                delays.reset()
            self._changed.notify()

    async def _return(self, session: Registered, leases: dict[bytes, Returned]) -> None:
        if not leases:
            return
        try:
            await self._ledger.give_back(session.session, leases)
        except (ConflictError, UnfitError) as error:
            logger.warning("the ledger does not take leases back: %s", error)
        for lease in leases:
            del self._outbox.returns[lease]

    async def _hand_in(self, session: Registered, results: list[Result]) -> None:
        """Hand in results, which stay in the outbox until the ledger has judged them."""
        if not results:
            return
        try:
            verdicts = await self._ledger.hand_in(session.session, results)
        except (ConflictError, UnfitError) as error:
            if len(results) > 1:  # one of them makes the request invalid
                for result in results:
                    await self._hand_in(session, [result])
                return
            logger.error("the result of job %s is lost: %s", results[0].job.hex(), error)
            self.verdicts["refused"] += 1
        else:
            for verdict in verdicts:
                self.verdicts["accepted" if verdict.accepted else verdict.reason or "rejected"] += 1
                if not verdict.accepted:
                    logger.info("job %s rejected: %s: %s", verdict.job.hex(), verdict.reason, verdict.detail)
        done = {result.lease for result in results}
        self._book.results_left(done)
        self._outbox.results = [result for result in self._outbox.results if result.lease not in done]


def _one_request(results: list[Result]) -> list[Result]:
    """Return the first results, as many as one request should contain."""
    size = 0
    for count, result in enumerate(results[:MAX_LIST]):
        size += result.token_ids.nbytes + result.mask.nbytes + result.logprobs.nbytes
        size += 0 if result.routed_experts is None else len(result.routed_experts.ids)
        size += 0 if result.top_logprobs is None else result.top_logprobs.nbytes
        if count and size > REQUEST_BYTES:
            return results[:count]
    return results[:MAX_LIST]
