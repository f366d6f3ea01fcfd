"""A run of the rollout plane as events: workers that sample, broadcasts, a learner, faults, the fleet's controller.

Decisions are the daemon's own (`netem.rollouts.simulated_ledger`, `trainer_node.scheduling.worker_fleet`). Modelled:
engines whose slots sample at a constant rate, arrival times of versions, the duration of a learner step. The same seed
gives the same run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from netem.rollouts.run_figures import RunFigures
from netem.rollouts.simulated_ledger import Lease, SimulatedLedger
from netem.rollouts.simulated_run import Machine, RolloutFault, SimulatedRun
from trainer_node.ledger.staleness_rule import room
from trainer_node.scheduling.shares import PROBE_S
from trainer_node.scheduling.worker_fleet import CandidateWorker, FleetControl

SILENT_BEATS: Final = 3
"""Heartbeats that a worker misses before the fleet's controller counts it as dead."""
IDLE_S: Final = 10 * PROBE_S
"""Time without any event but heartbeats after which a run counts as deadlocked."""
LONGEST_S: Final = 400.0
"""Longest run, as a multiple of the time that all steps and broadcasts take one after another. A longer run counts as
deadlocked.
"""


@dataclass(slots=True)
class SimulatedSample:
    """A sample in an engine. ``begun``: the engine's progress at its beginning. ``slowness``: of a straggler above 1.
    ``steps``: versions that sampled it.
    """

    lease: Lease
    begun: float
    slowness: float
    steps: set[int]

    @property
    def ends(self) -> float:
        """The engine's progress at its end."""
        return self.begun + self.lease.job.tokens * self.slowness


@dataclass(slots=True)
class SimulatedEngine:
    """All slots sample at one rate, so one number tells how far each sample is. ``progress`` counts the tokens that a
    slot without stragglers would have made since the start.
    """

    machine: Machine
    served: int
    at_s: float = 0.0
    """Time of the figures below."""
    factor: float = 1.0
    alive: bool = True
    leaves: bool = False
    staged: int | None = None
    samples: dict[int, SimulatedSample] = field(default_factory=dict)
    progress: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Progress and lease of each sample's end: a heap, with samples that were aborted."""
    stamp: int = 0
    """Of the event of the next end."""
    busy_s: float = 0.0
    """Wall-clock time with a sample."""
    slot_s: float = 0.0
    """Busy time of all slots together."""
    settled_busy_s: float = 0.0
    tokens: float = 0.0
    died_s: float = math.inf
    seen: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Time, busy time of all slots and tokens at the controller's looks."""

    @property
    def free(self) -> int:
        """Slots for which the worker asks for jobs."""
        asks = self.alive and not self.leaves and self.staged is None
        return self.machine.slots - len(self.samples) if asks else 0

    @property
    def rate(self) -> float:
        """Tokens a second of a slot."""
        most = self.machine.most_tokens_per_s
        each = self.machine.tokens_per_s
        return self.factor * (min(each, most / len(self.samples)) if most and self.samples else each)

    def advance(self, now_s: float) -> None:
        """Bring the figures up to date."""
        seconds, self.at_s = now_s - self.at_s, now_s
        if not self.samples:
            return
        self.busy_s += seconds
        self.slot_s += len(self.samples) * seconds
        made = self.rate * seconds
        self.progress += made
        self.tokens += made * sum(1 / each.slowness for each in self.samples.values())

    def sampled(self, sampling: SimulatedSample) -> float:
        """Tokens of a sample so far."""
        return min(sampling.lease.job.tokens, (self.progress - sampling.begun) / sampling.slowness)

    def next_end(self) -> float | None:
        """The engine's progress at the end of its next sample."""
        while self.ends and self.ends[0][1] not in self.samples:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else None


def simulate_run(run: SimulatedRun, seed: int = 0) -> RunFigures:
    """Raises UsageError for an impossible run."""
    run.check()
    return RolloutSimulation(run, Random(seed)).play()


class RolloutSimulation:
    def __init__(self, run: SimulatedRun, rng: Random) -> None:
        self._run, self._rng = run, rng
        self._now = 0.0
        self._serial = 0
        self._agenda: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._pending = 0
        """Events other than heartbeats and looks."""
        self._engines: dict[str, SimulatedEngine] = {m.name: SimulatedEngine(m, 0) for m in run.machines}
        self._kinds = {m.name: m.kind for m in run.machines}
        self._ledger = SimulatedLedger(run, self._kinds, self._samples)
        self._training = False
        self._idle_since_s = 0.0
        self._wait_s: list[float] = []
        self._applied_s: list[float] = []
        self._figures = RunFigures(run)
        self._arrivals: dict[str, tuple[float, int]] = {}
        """Time and step of the version on its way to each worker."""
        self._broadcast_ends_s = 0.0
        self._queued: int | None = None
        self._faults = list(run.faults)
        self._control = FleetControl()
        self._standby = list(run.control.standby) if run.control else []
        self._starting: list[Machine] = []
        self._first = 0

    # -- events

    def _at(self, at_s: float, act: Callable[[], None], *, periodic: bool = False) -> None:
        self._serial += 1
        self._pending += not periodic
        heapq.heappush(self._agenda, (max(at_s, self._now), self._serial, periodic, act))

    def play(self) -> RunFigures:
        run = self._run
        for fault in run.faults:
            if fault.step is None:
                self._at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._ledger.publish(0, self._engines)
        self._at(run.heartbeat_s, self._heartbeat, periodic=True)
        if run.control is not None:
            self._at(run.control.look_s, self._look, periodic=True)
        self._offer()
        limit_s = LONGEST_S * run.steps * (run.train_s + run.broadcast.seconds + self._slowest_s())
        quiet_s = 0.0
        while self._agenda and self._ledger.step < run.steps:
            at_s, _, periodic, act = heapq.heappop(self._agenda)
            self._now = at_s
            self._pending -= not periodic
            act()
            quiet_s = self._now if self._pending or self._ledger.leases else quiet_s
            if self._now - quiet_s > max(IDLE_S, 2 * run.heartbeat_s) or self._now > limit_s:
                self._figures.deadlock = True
                break
        return self._finished()

    def _slowest_s(self) -> float:
        slowest = min(min(m.tokens_per_s, (m.most_tokens_per_s or math.inf) / m.slots) for m in self._run.machines)
        return self._run.samples.most * self._run.samples.straggler_factor / slowest

    def _samples(self) -> list[tuple[int, bool, float]]:
        run, draw = self._run, self._rng
        form = run.samples
        equal, whole = draw.random() < form.equal, float(draw.random() < 0.5)
        made = []
        for index in range(run.size):
            tokens = max(1, min(form.most, round(form.median * math.exp(draw.gauss(0.0, form.spread)))))
            reward = whole if equal else float(index % 2)
            made.append((tokens, draw.random() < form.stragglers, reward))
        return made

    # -- engines

    def _schedule(self, engine: SimulatedEngine) -> None:
        """The engine's samples or its rate have changed."""
        engine.stamp += 1
        if (end := engine.next_end()) is None:
            return
        stamp, name = engine.stamp, engine.machine.name
        self._at(self._now + max(0.0, end - engine.progress) / engine.rate, lambda: self._ended(name, stamp))

    def _ended(self, name: str, stamp: int) -> None:
        engine = self._engines[name]
        if engine.stamp != stamp:
            return
        engine.advance(self._now)
        end = engine.next_end()
        assert end is not None
        sampling = engine.samples.pop(heapq.heappop(engine.ends)[1])
        said = self._ledger.hand_in(sampling.lease.number, sampling.steps, self._now)
        self._figures.handed_in(sampling.lease, said, self._now)
        self._settle(engine)
        self._schedule(engine)
        self._step()

    def _settle(self, engine: SimulatedEngine) -> None:
        """A sample has left the engine: an engine that drains may commit now."""
        if engine.staged is not None and not engine.samples:
            engine.served, engine.staged = engine.staged, None

    def _offer(self) -> None:
        """Give jobs to workers that ask, in turns, until no worker gets any."""
        names = list(self._engines)
        granted = True
        while granted:
            granted = False
            for at in range(len(names)):
                name = names[(self._first + at) % len(names)]
                if self._engines[name].free <= 0:
                    continue
                free = {each: engine.free for each, engine in self._engines.items() if engine.alive}
                served = {each: engine.served for each, engine in self._engines.items()}
                count = self._ledger.allowed(name, free, served, self._now)
                leases = self._ledger.lease(name, count, served[name], self._now)
                for lease in leases:
                    self._begin(self._engines[name], lease)
                if leases:
                    self._schedule(self._engines[name])
                    granted = True
            self._first += 1

    def _begin(self, engine: SimulatedEngine, lease: Lease) -> None:
        engine.advance(self._now)
        slowness = self._run.samples.straggler_factor if lease.job.straggles else 1.0
        sampling = engine.samples[lease.number] = SimulatedSample(lease, engine.progress, slowness, {engine.served})
        heapq.heappush(engine.ends, (sampling.ends, lease.number))

    def _heartbeat(self) -> None:
        for engine in self._engines.values():
            if not engine.alive:
                continue
            engine.advance(self._now)
            sampled = {number: engine.sampled(sampling) for number, sampling in engine.samples.items()}
            for number in self._ledger.heartbeat(sampled, self._now):
                self._ledger.abort(number, engine.sampled(engine.samples.pop(number)))
                self._schedule(engine)
            self._settle(engine)
        self._figures.expired(self._ledger.expire(self._now, lambda name: self._engines[name].alive))
        self._figures.timeline.append((self._now, sum(engine.tokens for engine in self._engines.values())))
        self._step()
        self._at(self._now + self._run.heartbeat_s, self._heartbeat, periodic=True)

    # -- the learner

    def _step(self) -> None:
        """Let the learner take a batch if there is one, and workers take jobs."""
        if not self._training and self._ledger.take():
            self._training = True
            self._wait_s.append(self._now - self._idle_since_s)
            self._at(self._now + self._run.train_s, self._trained)
        self._offer()

    def _trained(self) -> None:
        run, ledger = self._run, self._ledger
        self._training = False
        ledger.applied()
        self._applied_s.append(self._now)
        self._idle_since_s = self._now
        # A learner that nothing can feed has to publish, whatever the period.
        starved = not ledger.groups and room(ledger.bounds, 0, ledger.published[-1], ledger.step) == 0
        if ledger.step % run.every == 0 or starved or ledger.step == run.steps:
            self._publish(ledger.step)
        self._step()

    def _publish(self, step: int) -> None:
        for name, engine in self._engines.items():
            engine.advance(self._now)
            self._ledger.join(name)
            self._ledger.throughputs.busy(name, engine.busy_s - engine.settled_busy_s)
            engine.settled_busy_s = engine.busy_s
        newest = self._ledger.published[-1]
        self._ledger.publish(step, [n for n, e in self._engines.items() if e.alive and e.served >= newest])
        if self._broadcast_ends_s > self._now:
            self._queued = step
        else:
            self._send(step)

    # -- broadcasts

    def _send(self, step: int) -> None:
        """Send a version along the chains; the next version waits until this one has arrived everywhere."""
        form = self._run.broadcast
        names = [name for name, engine in self._engines.items() if engine.alive]
        counted = max(1, math.ceil(form.share * len(names)))
        self._arrivals = {}
        for rank, name in enumerate(names):
            share = form.first + (1 - form.first) * (rank + 1) / counted
            self._arrive(name, self._now + form.seconds * share, step)
        self._broadcast_ends_s = max((at for at, _ in self._arrivals.values()), default=self._now)
        self._at(self._broadcast_ends_s, self._sent)
        for fault in [each for each in self._faults if each.step is not None and step >= each.step]:
            self._faults.remove(fault)
            self._at(self._now + form.seconds / 2, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _arrive(self, name: str, at_s: float, step: int) -> None:
        self._arrivals[name] = (at_s, step)
        self._at(at_s, lambda: self._received(name, at_s, step))

    def _received(self, name: str, at_s: float, step: int) -> None:
        if self._arrivals.get(name) != (at_s, step):
            return
        engine = self._engines[name]
        engine.advance(self._now)
        if self._run.drains and engine.samples:
            engine.staged = step
        else:
            engine.served = step
            for sampling in engine.samples.values():
                sampling.steps.add(step)
        self._step()

    def _sent(self) -> None:
        if self._broadcast_ends_s > self._now:
            self._at(self._broadcast_ends_s, self._sent)
        elif self._queued is not None:
            step, self._queued = self._queued, None
            self._send(step)

    # -- faults and the fleet

    def _strike(self, fault: RolloutFault) -> None:
        engine, form = self._engines[fault.worker], self._run.broadcast
        self._figures.struck_s = self._now
        engine.advance(self._now)
        names = list(self._engines)
        chain = names[names.index(fault.worker) :: form.chains]
        if fault.kind.startswith("forwarder"):
            for name in chain:
                if name in self._arrivals and self._arrivals[name][0] > self._now:
                    at_s, step = self._arrivals[name]
                    left_s = at_s - self._now
                    left_s = left_s / fault.factor if name == fault.worker else left_s + form.repair_s
                    self._arrive(name, self._now + left_s, step)
        if fault.kind.endswith("dies"):
            self._die(engine)
        if fault.kind.startswith("forwarder"):
            ends_s = max((at for at, _ in self._arrivals.values()), default=self._now)
            self._figures.late_s = max(0.0, ends_s - self._broadcast_ends_s)
            self._broadcast_ends_s = max(self._broadcast_ends_s, ends_s)
        if fault.kind == "worker slows":
            engine.factor *= fault.factor
            self._schedule(engine)
        self._step()

    def _die(self, engine: SimulatedEngine) -> None:
        engine.alive, engine.died_s = False, self._now
        self._arrivals.pop(engine.machine.name, None)
        for number, sampling in engine.samples.items():
            self._ledger.lost(number, engine.sampled(sampling))
            self._figures.lost(sampling.lease)
        engine.samples.clear()
        self._schedule(engine)

    def _look(self) -> None:
        """The fleet's controller measures each worker and compares the sum with its target."""
        control = self._run.control
        assert control is not None
        active = []
        silent_s = SILENT_BEATS * self._run.heartbeat_s
        for name, engine in self._engines.items():
            if engine.alive:
                engine.advance(self._now)
            elif self._now - engine.died_s >= silent_s:
                continue
            if not engine.leaves:
                active.append(CandidateWorker(name, engine.machine.usd_per_h, self._measured(engine, control.window_s)))
        standby = [CandidateWorker(m.name, m.usd_per_h, m.capacity) for m in self._standby]
        capacity = sum(each.rollouts_per_s for each in active)
        self._note(capacity, control.target_per_s)
        active += [CandidateWorker(m.name, m.usd_per_h, m.capacity) for m in self._starting]
        change = self._control.decide(self._now, control.target_per_s, active, standby)
        for started in change.activate:
            machine = next(m for m in self._standby if m.name == started.name)
            self._standby.remove(machine)
            self._starting.append(machine)
            self._figures.started += 1
            self._at(self._now + machine.ready_s, lambda machine=machine: self._join(machine))  # type: ignore[misc]
        for released in change.release:
            self._engines[released.name].leaves = True
            self._figures.released += 1
        self._at(self._now + control.look_s, self._look, periodic=True)

    def _note(self, capacity: float, target: float) -> None:
        """The fleet's capacity after a fault: its least, and when it was too low and enough again."""
        figures = self._figures
        if figures.struck_s is None:
            return
        figures.least_capacity = min(figures.least_capacity, capacity)
        if figures.short_s is None and capacity < target:
            figures.short_s = self._now
        if figures.short_s is not None and capacity >= target:
            figures.recovered_s = figures.recovered_s or self._now

    def _measured(self, engine: SimulatedEngine, window_s: float) -> float:
        """Tokens per busy second of a slot in the window, times slots; of an idle worker, what its engine can make."""
        engine.seen.append((self._now, engine.slot_s, engine.tokens))
        while self._now - engine.seen[0][0] > window_s:
            engine.seen.popleft()
        _, slot_s, tokens = engine.seen[0]
        busy_s, machine = engine.slot_s - slot_s, engine.machine
        each = (engine.tokens - tokens) / busy_s if busy_s > 0 else machine.tokens_per_s * engine.factor
        most = machine.most_tokens_per_s * engine.factor or math.inf
        return min(most, each * machine.slots)

    def _join(self, machine: Machine) -> None:
        self._starting.remove(machine)
        self._kinds[machine.name] = machine.kind
        self._engines[machine.name] = SimulatedEngine(machine, self._ledger.published[-1], at_s=self._now)
        self._ledger.join(machine.name)
        self._step()

    def _finished(self) -> RunFigures:
        for engine in self._engines.values():
            engine.advance(self._now)
            for sampling in engine.samples.values():
                self._ledger.tokens["unfinished"] += round(engine.sampled(sampling))
        self._figures.timeline.append((self._now, sum(engine.tokens for engine in self._engines.values())))
        self._figures.close(self._ledger, self._now, self._wait_s, self._applied_s)
        return self._figures
