"""The ledger of a simulated run: groups, jobs and leases in memory, with the daemon's own decisions.

Which groups open: `trainer_node.ledger.staleness_rule`. Which make a batch: `batch_cut`. Which results count:
`trainer_node.ledger.acceptance`. How long leases last: `trainer_node.ledger.lease_time`. Which worker gets how many
jobs: `trainer_node.scheduling.shares`. Time is passed in.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from netem.rollouts.simulated_run import SimulatedRun
from p2pcast.ground.version import Version
from trainer_node.ledger.acceptance import Reason, Standards, version_rejection
from trainer_node.ledger.batch_cut import OVERSAMPLE, CandidateGroup, Cut, GroupVerdict, cut, judge
from trainer_node.ledger.lease_time import Completions, latest_s
from trainer_node.ledger.lineage import Lineage
from trainer_node.ledger.staleness_rule import StalenessBounds, room
from trainer_node.scheduling.shares import Load, Throughputs, jobs_for, split

FIXED = ("fixed shares", "uniform")
"""Policies that hand out a whole batch before the next one, when all its results are in."""
STALE_ENDINGS = 3
"""Jobs of a group that became stale before it is dropped."""


@dataclass(slots=True)
class SimulatedJob:
    """``tokens``: of its sample. ``straggles``: its sample takes longer. ``oldest``: no older version may play it."""

    group: SimulatedGroup
    tokens: int
    straggles: bool
    reward: float
    oldest: int
    leased: int = 0
    settled: bool = False


@dataclass(slots=True)
class SimulatedGroup:
    """``opened``: its number. ``results``: step, reward and tokens of each accepted one. ``fate``: how it ended."""

    opened: int
    jobs: list[SimulatedJob] = field(default_factory=list)
    results: list[tuple[int, float, int, int]] = field(default_factory=list)
    """Oldest step, reward, tokens, and the learner's step when the result was accepted."""
    unsettled: int = 0
    stale_endings: int = 0
    fate: str | None = None

    def candidate(self) -> CandidateGroup:
        return CandidateGroup(
            self.opened, [each[0] for each in self.results], [each[1] for each in self.results], self.unsettled
        )


@dataclass(slots=True)
class Lease:
    number: int
    job: SimulatedJob
    worker: str
    served: int
    granted_s: float
    expires_s: float
    latest_s: float
    duration_s: float
    tokens: float = 0.0
    expired: bool = False


class SimulatedLedger:
    """``sample`` draws a group's samples: (tokens, whether the sample straggles, reward) for each."""

    def __init__(
        self, run: SimulatedRun, kinds: Mapping[str, str], sample: Callable[[], list[tuple[int, bool, float]]]
    ) -> None:
        self._run, self._kinds, self._sample = run, kinds, sample
        self.bounds = StalenessBounds(run.staleness, run.groups, run.steps)
        self.step = 0
        self.published: list[int] = []
        self.groups: dict[int, SimulatedGroup] = {}
        """Groups that are neither trained nor dropped."""
        self.batch: list[SimulatedGroup] | None = None
        self.leases: dict[int, Lease] = {}
        self.throughputs = Throughputs()
        self.tokens: Counter[str] = Counter()
        """Sampled tokens by what became of them."""
        self.endings: Counter[str] = Counter()
        """Leases by how they ended, and groups by fate."""
        self.in_flight: Counter[int] = Counter()
        self.in_queue: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self._manifests: dict[Version, bytes] = {}
        self._open: dict[int, list[tuple[int, int, SimulatedJob]]] = {}
        self._waiting: Counter[int] = Counter()
        """Jobs in the pool by the oldest step that may play them."""
        self._ready = 0
        """Settled groups with unequal rewards that are in no batch."""
        self._played = 0
        self._serial = 0
        self._completions: dict[str, Completions] = {}
        self._slowest: dict[str, float] = {}
        self._taken: Counter[str] = Counter()
        """Leases by worker since the newest publication."""
        self._cut_at = -1
        """Step for which a cut was tried."""
        self._shares: tuple[tuple[str, ...], dict[str, int]] = (), {}
        """Eligible workers, and their shares until the next publication."""

    # -- versions and workers

    def publish(self, step: int, able: Iterable[str]) -> None:
        """``able``: workers that may take part in the version at once."""
        self.published.append(step)
        self._manifests[Version(0, step)] = b""
        for worker in self._kinds:
            self.throughputs.join(worker)
            self.throughputs.settle(worker)
        self.throughputs.published(set(able))
        if self._run.policy not in FIXED:
            self._taken.clear()
            self._shares = (), {}

    def join(self, worker: str) -> None:
        self.throughputs.join(worker)

    def available(self, served: int) -> int:
        """Jobs that an engine with this version could be given."""
        if self._run.newest_only and served != self.published[-1]:
            return 0
        waiting = sum(count for oldest, count in self._waiting.items() if oldest <= served)
        return waiting + room(self.bounds, len(self.groups), served, self.step) * self._run.size

    # -- leases

    def allowed(self, worker: str, free: Mapping[str, int], served: Mapping[str, int], now_s: float) -> int:
        """How many jobs the worker may lease. ``free``: free slots of each worker; 0 for one that asks for no jobs."""
        leasable = {each: self.available(served[each]) if slots else 0 for each, slots in free.items()}
        wanted = min(free[worker], leasable[worker])
        if wanted <= 0 or self._run.policy == "pull":
            return wanted
        shares = self._shares_of(tuple(each for each in free if self.step - served[each] <= self._run.staleness))
        if self._run.policy in FIXED:
            if self.leases == {} and sum(self._taken.values()) >= sum(shares.values()):
                self._taken.clear()
                self._shares = (), {}
                return self.allowed(worker, free, served, now_s)
            return min(wanted, max(0, shares.get(worker, 0) - self._taken[worker]))
        loads = {each: Load(self._taken[each], min(slots, leasable[each])) for each, slots in free.items()}
        count = jobs_for(worker, wanted, shares, loads)
        if count == 0 and shares.get(worker, 0) == 0 and self.throughputs.may_probe(worker, now_s):
            self.throughputs.probed(worker, now_s)
            return 1
        return count

    def _shares_of(self, able: tuple[str, ...]) -> dict[str, int]:
        if self._shares[0] != able:
            jobs = self._run.every * self._run.groups * self._run.size
            estimates = self.throughputs.of(able)
            weights = dict.fromkeys(able, 1.0) if self._run.policy == "uniform" else estimates
            self._shares = able, split(jobs, weights)
        return self._shares[1]

    def lease(self, worker: str, count: int, served: int, now_s: float) -> list[Lease]:
        made: list[Lease] = []
        while len(made) < count and (job := self._next(served)) is not None:
            made.append(self._granted(job, worker, served, now_s))
        return made

    def _next(self, served: int) -> SimulatedJob | None:
        heads = [(heap[0][:2], oldest) for oldest, heap in self._open.items() if oldest <= served and heap]
        if heads:
            oldest = min(heads)[1]
            job = heapq.heappop(self._open[oldest])[2]
            self._waiting[oldest] -= 1
            return job
        if room(self.bounds, len(self.groups), served, self.step) == 0:
            return None
        self._serial += 1
        group = self.groups[self._serial] = SimulatedGroup(self._serial)
        for tokens, straggles, reward in self._sample():
            job = SimulatedJob(group, tokens, straggles, reward, served)
            group.jobs.append(job)
            group.unsettled += 1
            self._back(job)
        return self._next(served)

    def _back(self, job: SimulatedJob) -> None:
        """The job returns to the pool."""
        self._serial += 1
        heapq.heappush(self._open.setdefault(job.oldest, []), (job.group.opened, self._serial, job))
        self._waiting[job.oldest] += 1

    def _granted(self, job: SimulatedJob, worker: str, served: int, now_s: float) -> Lease:
        kind = self._kinds[worker]
        seconds = self._of(kind).lease_s()
        most_s = latest_s(self._run.samples.most, self._slowest.get(kind, 0.0), seconds)
        self._serial += 1
        job.leased += 1
        self._taken[worker] += 1
        if self._run.rule == "strict":
            job.oldest = served
        lease = Lease(
            self._serial, job, worker, served, now_s, now_s + seconds, now_s + max(most_s, seconds), seconds
        )  # fmt: skip
        self.leases[lease.number] = lease
        return lease

    def _of(self, kind: str) -> Completions:
        if kind not in self._completions:
            run = self._run
            self._completions[kind] = Completions(
                run.lease_guess_s, factor=run.lease_factor, least_s=run.lease_floor_s
            )  # fmt: skip
        return self._completions[kind]

    def heartbeat(self, tokens: Mapping[int, float], now_s: float) -> list[int]:
        """``tokens``: sampled so far, by lease. Returns the leases to abort."""
        aborted = []
        for number, sampled in tokens.items():
            lease = self.leases.get(number)
            if lease is None:
                aborted.append(number)
                continue
            if self.step - lease.served > self._run.staleness or lease.job.settled:
                aborted.append(number)
                continue
            if self._run.renews and sampled > lease.tokens:
                beats = self._run.renewal_beats
                renewed_s = now_s + (beats * self._run.heartbeat_s if beats else lease.duration_s)
                lease.expires_s = min(lease.latest_s, renewed_s)
            lease.tokens = sampled
        return aborted

    def abort(self, number: int, tokens: float) -> None:
        """The worker ended a sample that cannot count any more."""
        lease = self.leases.pop(number)
        job, group = lease.job, lease.job.group
        job.leased -= not lease.expired
        self.tokens["stale" if not job.settled else "superseded"] += round(tokens)
        self.endings["aborted"] += 1
        if job.settled or group.fate is not None:
            return
        group.stale_endings += 1
        if group.stale_endings >= STALE_ENDINGS:
            self._drop(group, GroupVerdict.STALE.value)
        elif job.leased == 0:
            job.oldest = max(job.oldest, self.step - self._run.staleness)
            self._back(job)

    def lost(self, number: int, tokens: float) -> None:
        """The worker died: its tokens are lost. The lease expires later."""
        self.tokens["lost"] += round(tokens)
        self.leases[number].tokens = tokens

    def expire(self, now_s: float, alive: Callable[[str], bool]) -> list[Lease]:
        """Leases that expire now; their jobs return to the pool. The worker may still hand a result in."""
        ended = []
        for lease in [each for each in self.leases.values() if each.expires_s <= now_s and not each.expired]:
            lease.expired = True
            self.endings["expired"] += 1
            self._of(self._kinds[lease.worker]).expired(now_s - lease.granted_s)
            job = lease.job
            job.leased -= 1
            if not job.settled and job.group.fate is None and job.leased == 0:
                self._back(job)
                ended.append(lease)
            if not alive(lease.worker):
                del self.leases[lease.number]
        return ended

    # -- results

    def hand_in(self, number: int, steps: set[int], now_s: float) -> str:
        """A whole sample by versions of these steps. Returns what became of it."""
        lease = self.leases.pop(number)
        job, group = lease.job, lease.job.group
        seconds, kind = now_s - lease.granted_s, self._kinds[lease.worker]
        self._of(kind).completed(seconds)
        if seconds > 0:
            self._slowest[kind] = min(self._slowest.get(kind, job.tokens / seconds), job.tokens / seconds)
        job.leased -= not lease.expired
        if (reason := self._rejected(lease, steps)) is not None:
            self.tokens[reason.value] += job.tokens
            self.endings[reason.value] += 1
            if not job.settled and group.fate is None and job.leased == 0:
                group.stale_endings += 1
                if group.stale_endings >= STALE_ENDINGS:
                    self._drop(group, GroupVerdict.STALE.value)
                elif not lease.expired:
                    job.oldest = max(job.oldest, self.step - self._run.staleness)
                    self._back(job)
            return reason.value
        self._forget(job)
        job.settled = True
        group.unsettled -= 1
        group.results.append((min(steps), job.reward, job.tokens, self.step))
        self.in_flight[self.step - min(steps)] += 1
        self.throughputs.accepted(lease.worker, job.tokens)
        self.endings["accepted"] += 1
        if group.unsettled == 0:
            self._complete(group)
        return "accepted"

    def _rejected(self, lease: Lease, steps: set[int]) -> Reason | None:
        if lease.job.settled or lease.job.group.fate is not None:
            return Reason.DUPLICATE
        standards = Standards(
            self._run.rule, self._run.staleness, 1, self.step, Lineage(0, {}), self._manifests
        )  # fmt: skip
        found = version_rejection(
            {Version(0, step) for step in steps}, "train", Version(0, lease.job.oldest), standards,
            in_time=not lease.expired,
        )  # fmt: skip
        return None if found is None else found.reason

    def _complete(self, group: SimulatedGroup) -> None:
        """All jobs of a group have ended. Groups that can never be trained give their room back at once."""
        verdict = judge(group.candidate(), self.step - self._run.staleness)
        if verdict is GroupVerdict.USE:
            self._ready += 1
        else:
            self._drop(group, verdict.value)

    def _forget(self, job: SimulatedJob) -> None:
        """Take the job out of the pool, if it is there: a late result has settled it."""
        heap = self._open.get(job.oldest, [])
        for at, entry in enumerate(heap):
            if entry[2] is job:
                heap[at] = heap[-1]
                heap.pop()
                heapq.heapify(heap)
                self._waiting[job.oldest] -= 1
                return

    def _drop(self, group: SimulatedGroup, why: str) -> None:
        group.fate = why
        self._played += 1
        self.endings[f"group: {why}"] += 1
        self.tokens[why] += sum(each[2] for each in group.results)
        self._cancel(group)
        del self.groups[group.opened]

    def _cancel(self, group: SimulatedGroup) -> None:
        """Jobs that have not ended are not played any more; heartbeats abort the ones that are leased."""
        for job in group.jobs:
            if not job.settled:
                if job.leased == 0:
                    self._forget(job)
                job.settled = True
        group.unsettled = 0

    # -- batches

    def take(self) -> bool:
        """Whether there is a batch for the learner now."""
        if self.batch is not None:
            return True
        enough = self._ready >= self.bounds.batch_groups
        exhausted = self._played + self._ready >= OVERSAMPLE * self.bounds.batch_groups and self._ready > 0
        if not enough and not exhausted and self._cut_at == self.step:
            return False
        self._cut_at = self.step
        chosen = [group for group in self.groups.values() if group.fate is None]
        done = cut(self.bounds, [group.candidate() for group in chosen], self.step, self._played)
        self._follow(done)
        return self.batch is not None

    def _follow(self, done: Cut) -> None:
        for candidate, verdict in done.dropped:
            group = self.groups[candidate.opened]
            self._ready -= verdict is not GroupVerdict.WAIT and group.unsettled == 0
            self._drop(group, verdict.value)
        if done.batch is None:
            return
        self.batch = [self.groups[candidate.opened] for candidate in done.batch]
        for group in self.batch:
            self._ready -= group.unsettled == 0
            group.fate = "batch"
            self._cancel(group)
        self.endings["short batches"] += len(self.batch) < self.bounds.batch_groups
        self._played = 0
        for group in self.batch:
            for oldest, _, tokens, accepted in group.results:
                fresh = oldest >= self.step - self._run.staleness
                self.tokens["trained" if fresh else GroupVerdict.STALE.value] += tokens
                if fresh:
                    self.staleness[self.step - oldest] += 1
                    self.in_queue[self.step - accepted] += 1

    def applied(self) -> None:
        """The learner has trained the batch."""
        assert self.batch is not None
        for group in self.batch:
            del self.groups[group.opened]
        self.endings["groups trained"] += len(self.batch)
        self.batch = None
        self.step += 1
