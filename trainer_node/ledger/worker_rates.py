"""Measurements of workers: throughput for shares, completion times for leases. Kept in memory alone.

Guarantees: measurements of a transaction count after its commit, once; those of a transaction that failed never do.
After a restart the estimates begin again: they decide who plays first and for how long, never what counts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from p2pcast.ground.version import Version
from trainer_node.ledger.lease_time import KEPT, LEAST_S, Completions, latest_s
from trainer_node.scheduling.shares import Load, Throughputs

Class = tuple[str, str]
"""Task and device class."""
MAX_CLASSES = 256
"""Classes with measurements of their own: workers state their device class themselves."""
HEARTBEAT_S, HEARTBEAT_MOST_S = 1.5, 25.0
"""Shortest and longest interval: a worker counts as silent after 60 s, and one heartbeat may be lost."""
MOST_HEARTBEATS_S = 100.0
"""Heartbeats a second of all workers together, as far as the longest interval allows it."""
HEARTBEATS_A_LEASE = 3
"""Least heartbeats in the time of a lease: one lost heartbeat ends no lease."""
STANDING_S = 0.25
"""Least seconds for which shares and loads are kept."""
STANDINGS_WORKERS_S = 1000.0
"""Workers whose shares and loads are computed in a second. With more of them, standings are kept longer: the time that
they take grows with the workers.
"""
WAITS_S = 1.0
"""Seconds for which jobs are kept for a worker that waits, once there are jobs: a worker that is there asks sooner."""
ASKED_S = 6.0
"""Seconds after a request for leases in which its worker counts as one that waits. A worker asks for 5 s at a time."""
OVERDUE = 4.0
"""A lease is overdue after so many times the completion of a result. Answers that are twice as long as most are common;
a job that is played twice costs a slot.
"""
SLOWEST = 0.1
"""Least rate of a result, as a share of the median of all callers. The longest time of a lease follows from it: a
caller may be ten times slower than the others.
"""
VOTE_KEPT = 0.7
"""Share of the earlier figure in a caller's smoothed figures."""


@dataclass(frozen=True, slots=True)
class WorkerLoads:
    """Shares and loads of a task's workers, in one batch at one time. ``loads``: kept up to date with new leases."""

    epoch: int
    step: int
    now_s: float
    shares: dict[str, int]
    loads: dict[str, Load]


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """Outcome of a request for leases. ``missing``: jobs that it asked for and did not get. ``emptied``: it would have
    begun more if there were more jobs.
    """

    leases: int
    missing: int
    emptied: bool


@dataclass(slots=True)
class _ClassTimes:
    completions: Completions
    tokens_per_s: deque[float]
    """Of the newest results. Not the slowest ever: one worker could else prolong all later leases for good."""


class WorkerRates:
    def __init__(self, guess_s: float) -> None:
        self.throughputs = Throughputs()
        self._guess_s = guess_s
        self._classes: OrderedDict[Class, _ClassTimes] = OrderedDict()
        self._busy_since: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._missing: dict[str, int] = {}
        """Jobs that a worker's newest request asked for and did not get."""
        self._jobs_since_s: float | None = None
        """Since when there have been jobs; None after a request that found too few."""
        self._completions_s: OrderedDict[str, float] = OrderedDict()
        self._tokens_per_s: OrderedDict[str, float] = OrderedDict()
        """Of each caller's results: one figure for each, so that no caller outvotes the others by many results."""
        self._staged: dict[str, Version | None] = {}
        self._standings: dict[bytes, WorkerLoads] = {}
        self._doubtful: set[bytes] = set()
        """Tasks whose standings are kept for ``STANDING_S`` at most, and not at all among few workers."""
        self._pending: list[Callable[[], None]] = []
        self.heartbeat_s = HEARTBEAT_S
        """Interval that workers are asked for."""

    def count_workers(self, count: int) -> None:
        """Heartbeats of many workers become rarer, so that they leave time for leases and results."""
        self.heartbeat_s = min(HEARTBEAT_MOST_S, max(HEARTBEAT_S, count / MOST_HEARTBEATS_S))

    # -- transactions

    def mark(self) -> int:
        """The place that ``undo`` goes back to."""
        return len(self._pending)

    def undo(self, mark: int) -> None:
        """Forget the measurements since the mark: their transition failed."""
        del self._pending[mark:]
        self._standings.clear()

    def keep(self) -> None:
        """The transaction is committed: its measurements count."""
        pending, self._pending = self._pending, []
        for measure in pending:
            measure()

    # -- measurements, which count after the commit

    def asks(self, worker: str, now_s: float, staged: Version | None) -> None:
        """Note a worker's request for leases. ``staged``: the version that its engine could serve at once."""
        self._pending.append(partial(self._asks, worker, now_s, staged))

    def _asks(self, worker: str, now_s: float, staged: Version | None) -> None:
        self._asked_s[worker], self._staged[worker] = now_s, staged
        self._missing[worker] = 0

    def began(self, worker: str, now_s: float, begun: LeaseOutcome, task_hash: bytes) -> None:
        """Note the leases begun for the worker's request."""
        self._pending.append(partial(self._began, worker, now_s, begun, task_hash))

    def _began(self, worker: str, now_s: float, begun: LeaseOutcome, task_hash: bytes) -> None:
        kept, leases = self._standings.get(task_hash), begun.leases
        self._missing[worker] = begun.missing
        if begun.emptied:
            self._jobs_since_s = None
            # The kept loads may say that another worker could take jobs: there are none for this one, perhaps none.
            self._doubtful.add(task_hash)
        if kept is not None and (load := kept.loads.get(worker)) is not None:
            kept.loads[worker] = Load(load.leases + leases, begun.missing)
        if leases:
            self.throughputs.join(worker)
            self._busy_since.setdefault(worker, now_s)

    def settled(self, worker: str, kind: Class, seconds: float, tokens: int, *, caller: str) -> None:
        """A result of ``tokens`` sampled tokens was accepted, ``seconds`` after its lease began. ``caller``: the party
        that answers for the worker.
        """
        self._pending.append(partial(self._settled, worker, kind, max(0.0, seconds), tokens, caller))

    def _settled(self, worker: str, kind: Class, seconds: float, tokens: int, caller: str) -> None:
        self.throughputs.join(worker)
        self.throughputs.accepted(worker, tokens)
        times = self._of(kind)
        times.completions.completed(seconds)
        if seconds > 0 and tokens:
            times.tokens_per_s.append(tokens / seconds)
            _vote(self._tokens_per_s, caller, tokens / seconds)
        _vote(self._completions_s, caller, seconds)

    def expired(self, worker: str, kind: Class, seconds: float) -> None:
        """A lease of so many seconds ended without a result. From now on no job waits for the worker, until it asks
        again. This holds although the transaction may fail: the worker's next request corrects it.
        """
        self._pending.append(lambda: self._of(kind).completions.expired(max(0.0, seconds)))
        self.gives_back(worker)

    def end_window(self, worker: str, now_s: float, *, still_busy: bool) -> None:
        """Fold the time since the last window into the worker's throughput."""
        self._pending.append(partial(self._end_window, worker, now_s, still_busy=still_busy))

    def _end_window(self, worker: str, now_s: float, *, still_busy: bool) -> None:
        since = self._busy_since.pop(worker, None)
        if since is not None:
            self.throughputs.join(worker)
            self.throughputs.busy(worker, max(0.0, now_s - since))
            self.throughputs.settle(worker)
        if still_busy:
            self._busy_since[worker] = now_s

    def published(self, eligible: Collection[str]) -> None:
        """A version was published, and these workers were able to play for the one before."""
        self._pending.append(partial(self.throughputs.published, eligible))

    def probed(self, worker: str, now_s: float) -> None:
        self.throughputs.join(worker)
        self._pending.append(partial(self.throughputs.probed, worker, now_s))

    def retain(self, workers: Collection[str]) -> None:
        """Forget all workers except these."""
        self._pending.append(partial(self._retain, frozenset(workers)))

    def _retain(self, workers: frozenset[str]) -> None:
        for table in (self._busy_since, self._asked_s, self._staged, self._missing):
            for worker in table.keys() - workers:
                del table[worker]
        for worker in self.throughputs.known() - workers:
            self.throughputs.leave(worker)

    def gives_back(self, worker: str) -> None:
        """Note that the worker is stopping or overloaded: no job is kept for it."""
        self._asked_s.pop(worker, None)
        for kept in self._standings.values():
            if (load := kept.loads.get(worker)) is not None:
                kept.loads[worker] = Load(load.leases, 0)

    # -- decisions

    def standing(self, task_hash: bytes, epoch: int, step: int, now_s: float) -> WorkerLoads | None:
        """The kept standing of the task's workers, while it is new enough."""
        kept = self._standings.get(task_hash)
        if kept is None or (kept.epoch, kept.step) != (epoch, step):
            return None
        lasts_s = max(STANDING_S, len(kept.loads) / STANDINGS_WORKERS_S)
        if task_hash in self._doubtful:
            lasts_s = STANDING_S if lasts_s > STANDING_S else 0.0
        return kept if 0 <= now_s - kept.now_s < lasts_s else None

    def lacks(self, worker: str, standing: WorkerLoads, now_s: float) -> bool:
        """Whether to compute a standing again because the worker is missing. Among many workers a new one waits for
        the time of a small standing: all of them may join at once.
        """
        if worker in standing.loads:
            return False
        return now_s - standing.now_s >= STANDING_S or len(standing.loads) < STANDINGS_WORKERS_S * STANDING_S

    def keep_standing(self, task_hash: bytes, standing: WorkerLoads) -> None:
        self._standings = {task_hash: standing}
        self._doubtful.clear()

    def staged(self, worker: str) -> Version | None:
        return self._staged.get(worker)

    def sees_jobs(self, now_s: float) -> None:
        """A worker asks for jobs, of which there may be some."""
        if self._jobs_since_s is None:
            self._jobs_since_s = now_s

    def waits_for(self, worker: str, now_s: float) -> int:
        """Jobs that are kept for the worker: those that its newest request asked for and did not get, as long as the
        worker had no time to take them.
        """
        asked_s = self._asked_s.get(worker, -ASKED_S)
        since_s = now_s if self._jobs_since_s is None else self._jobs_since_s
        if now_s - asked_s >= ASKED_S or now_s - max(asked_s, since_s) >= WAITS_S:
            return 0
        return self._missing.get(worker, 0)

    def overdue_s(self) -> float:
        """Return the age in seconds above which a lease has outlasted the time that results take."""
        seconds = sorted(self._completions_s.values())
        return OVERDUE * max(LEAST_S, seconds[len(seconds) // 2]) if seconds else OVERDUE * self._guess_s

    def may_probe(self, worker: str, now_s: float) -> bool:
        self.throughputs.join(worker)
        return self.throughputs.may_probe(worker, now_s)

    def terms(self, kind: Class, max_tokens: int) -> tuple[float, float]:
        """Of a new lease: seconds without a heartbeat, and the longest seconds in all."""
        times = self._classes.get(kind)
        lasts_s = (Completions(self._guess_s) if times is None else times.completions).lease_s()
        lasts_s = max(lasts_s, HEARTBEATS_A_LEASE * self.heartbeat_s)
        slowest = min(times.tokens_per_s, default=0.0) if times is not None else 0.0
        if slowest > 0:
            rates = sorted(self._tokens_per_s.values())
            # Of an even number the slower one: a fabricated rate must not end leases of others early.
            slowest = max(slowest, SLOWEST * rates[(len(rates) - 1) // 2])
        return lasts_s, latest_s(max_tokens, slowest, lasts_s)

    def estimates(self) -> Mapping[str, float | None]:
        """Return the tokens per second of each known worker, or None before its first settlement."""
        return {worker: self.throughputs.estimate(worker) for worker in self.throughputs.known()}

    def _of(self, kind: Class) -> _ClassTimes:
        if kind not in self._classes:
            self._classes[kind] = _ClassTimes(Completions(self._guess_s), deque(maxlen=KEPT))
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(kind)
        return self._classes[kind]


def _vote(votes: OrderedDict[str, float], caller: str, figure: float) -> None:
    votes[caller] = VOTE_KEPT * votes[caller] + (1 - VOTE_KEPT) * figure if caller in votes else figure
    votes.move_to_end(caller)
    if len(votes) > MAX_CLASSES:
        votes.popitem(last=False)
