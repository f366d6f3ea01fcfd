"""ECHO-2's fleets in simulation at paper scale: Table 2, cost of a step, and Table 4, a fault of one worker of eight.
No network; all rows simulated.

Table 2: nine or ten workers out of a pool of unlike prices, chosen by `trainer_node.scheduling.worker_fleet.cheapest`
or at random; T_bcast is the paper's. The paper does not give the pool's prices: ``price_usd_h``, ``price_step`` and
``pool`` are fitted to its rows "full" and "w/o Cost". Eight workers saturate the learner (the paper's appendix D),
hence ``rollouts_per_s``.

Table 4: eight workers just saturate the learner. `trainer_node.scheduling.worker_fleet.FleetControl` starts a
replacement after a sustained shortfall; ``start_s`` and the snapshot over ``snapshot_bps`` pass until the replacement
works. A broken chain is repaired after ``repair_s``.

``assumption``: as in ``worker_overlap``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from netem.emulation.tables import bounded, filled
from netem.lab.experiments.worker_overlap import BOUNDED, NEWEST
from netem.rollouts.rollout_simulator import simulate_run
from netem.rollouts.run_figures import RunFigures
from netem.rollouts.simulated_run import (
    FAULTS,
    BroadcastDelay,
    Control,
    Machine,
    RolloutFault,
    Samples,
    SimulatedRun,
    mean_tokens,
)
from p2pcast.ground.errors import LocalError, UsageError
from trainer_node.scheduling.overlap import (
    CAPACITY_MARGIN,
    RolloutPace,
    least_rollouts_per_s,
    least_rollouts_per_s_within,
)
from trainer_node.scheduling.worker_fleet import CandidateWorker, cheapest

FULL = "full"
PAPER_USD = {FULL: 8.098, "w/o P2P": 8.432, "w/o P2P, one more": 8.630, "w/o Cost": 9.339}
TABLE_2 = {FULL: (1437.0, 0), "w/o P2P": (1830.0, 0), "w/o P2P, one more": (1872.0, 1), "w/o Cost": (1437.0, 0)}
"""Row → the paper's T_bcast in seconds, and workers beyond the cheapest fleet."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``table``: of the paper, 2 or 4. ``learner_usd_h``: four A100. ``scale``: divisor of groups and slots.
    ``snapshot_bytes``: fetched by a replacement. ``draws``: random fleets of "w/o Cost".
    """

    table: int = 2
    assumption: str = NEWEST
    train_s: float = 1631.2
    groups: int = 128
    size: int = 16
    staleness: int = 3
    rollouts_per_s: float = 0.2805
    slots: int = 32
    scale: int = 16
    learner_usd_h: float = 12.24
    price_usd_h: float = 0.556
    price_step: float = 0.0175
    pool: int = 44
    draws: int = 200
    start_s: float = 30.0
    snapshot_bytes: float = 16.4e9
    snapshot_bps: float = 1e9
    repair_s: float = 6.0
    chains: int = 3
    steps: int = 30
    warm_up: int = 6

    def check(self) -> None:
        bounded(
            self, train_s=(0.1, 1e6), groups=(1, 10_000), size=(2, 1000), staleness=(1, 100),
            rollouts_per_s=(1e-4, 1e4), slots=(1, 10_000), scale=(1, 1000), learner_usd_h=(0, 1e5),
            price_usd_h=(0.001, 1e4), price_step=(0, 1e3), pool=(12, 1000), draws=(1, 100_000), start_s=(0, 1e5),
            snapshot_bytes=(1, 1e15), snapshot_bps=(1, 1e15), repair_s=(0, 1e5), chains=(1, 100), steps=(4, 10_000),
            warm_up=(0, self.steps - 1),
        )  # fmt: skip
        if self.table not in (2, 4):
            raise UsageError(f"parameters.table is {self.table}: it must be 2 or 4")
        if self.assumption not in (NEWEST, BOUNDED):
            raise UsageError(f"parameters.assumption is {self.assumption!r}: it must be {NEWEST} or {BOUNDED}")
        if self.groups % self.scale or self.slots % self.scale:
            raise UsageError(f"parameters.scale is {self.scale}: groups and slots must be multiples of it")

    @property
    def every(self) -> int:
        return max(1, self.staleness - 1)

    def pace(self, broadcast_s: float) -> RolloutPace:
        return RolloutPace(self.train_s, broadcast_s, self.groups * self.size, self.every)


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    rows = costs(given) if given.table == 2 else faults(given)
    yield from ({"row": {"simulated": True, **row}} for row in rows)


# -- Table 2


def costs(given: Parameters) -> Iterator[dict[str, Any]]:
    prices = [given.price_usd_h + given.price_step * n for n in range(given.pool)]
    candidates = [CandidateWorker(f"w{n:03}", price, given.rollouts_per_s) for n, price in enumerate(prices)]
    target = CAPACITY_MARGIN * least_rollouts_per_s(given.pace(TABLE_2[FULL][0]))
    chosen = cheapest(candidates, target)
    if chosen is None:
        raise LocalError(f"the pool of {given.pool} workers does not reach {target:.3g} rollouts/s")
    rng = Random(0)
    for name, (broadcast_s, more) in TABLE_2.items():
        count = len(chosen) + more
        spent = sum(each.usd_per_h for each in candidates[:count])
        if name == "w/o Cost":
            spent = fmean(sum(rng.sample(prices, count)) for _ in range(given.draws))
        run = run_of(given, count, given.rollouts_per_s, broadcast_s)
        figures = simulate_run(run, 1)
        step_s = given.train_s / (1 - figures.bubble(given.warm_up))
        usd = (given.learner_usd_h + spent) * step_s / 3600
        yield {
            "row": name,
            "workers": count,
            "broadcast_s": broadcast_s,
            "usd_per_step": round(usd, 3),
            "paper_ratio": round(usd / PAPER_USD[name], 4),
            "wait_s": round(step_s - given.train_s, 1),
            "worst_staleness": figures.worst_staleness,
        }


def run_of(given: Parameters, workers: int, rollouts_per_s: float, broadcast_s: float) -> SimulatedRun:
    samples = Samples(1600.0, 0.67, 8192)
    each = rollouts_per_s * mean_tokens(samples) / given.slots
    machines = tuple(Machine(f"w{n}", given.slots // given.scale, each) for n in range(workers))
    return SimulatedRun(
        machines, BroadcastDelay(broadcast_s, first=1.0, chains=given.chains, repair_s=given.repair_s), given.train_s,
        given.groups // given.scale, given.size, given.steps, given.staleness, given.every, samples,
        newest_only=given.assumption == NEWEST,
    )  # fmt: skip


# -- Table 4


def faults(given: Parameters) -> Iterator[dict[str, Any]]:
    """Eight workers that just saturate the learner."""
    workers, pace = 8, given.pace(TABLE_2[FULL][0])
    newest = given.assumption == NEWEST
    least = least_rollouts_per_s(pace) if newest else least_rollouts_per_s_within(pace, given.staleness)
    run = run_of(given, workers, least / workers, pace.broadcast_s)
    calm = simulate_run(run, 1)
    for kind in FAULTS:
        struck = simulate_run(struck_run(given, run, kind), 1)
        yield fault_row(given, kind, struck, calm)


def struck_run(given: Parameters, run: SimulatedRun, kind: str) -> SimulatedRun:
    """The run with a fault of its third worker in mid-run, and two standby workers like the others."""
    first = run.machines[0]
    capacity = len(run.machines) * first.slots * first.tokens_per_s
    ready_s = given.start_s + 8 * given.snapshot_bytes / given.snapshot_bps
    control = Control(
        capacity * (1 - 1e-6), tuple(replace(first, name=f"spare-{n}", ready_s=ready_s) for n in range(2))
    )
    step = given.every * (given.steps // (2 * given.every))
    at_s = (step + 1.5) * given.train_s
    fault = RolloutFault(kind, "w2", at_s, step if kind.startswith("forwarder") else None)
    return replace(run, faults=(fault,), control=control)


def fault_row(given: Parameters, kind: str, struck: RunFigures, calm: RunFigures) -> dict[str, Any]:
    machines = struck.run.machines
    capacity = len(machines) * machines[0].slots * machines[0].tokens_per_s
    recovered = struck.recovered_s is not None and struck.struck_s is not None
    return {
        "row": kind,
        "workers": len(machines),
        "broadcast_s": TABLE_2[FULL][0],
        "drop": round(max(0.0, 1 - struck.least_capacity / capacity), 4),
        "recovery_s": round((struck.recovered_s or 0.0) - (struck.struck_s or 0.0), 1) if recovered else 0.0,
        "bubble_more": round(struck.bubble(given.warm_up) - calm.bubble(given.warm_up), 4),
        "started": struck.started,
        "late_s": None if struck.late_s is None else round(struck.late_s, 1),
        "worst_staleness": struck.worst_staleness,
    }
