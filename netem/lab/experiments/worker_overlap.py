"""The learner's bubble ratio against the number of workers, predicted and simulated. No network; all rows simulated.

ECHO-2's section 5.4 and Figure 3c at the scale of its 8B runs. ``assumption`` ``newest``: engines sample nothing while
a version is on its way, as ECHO-2's appendix B assumes; predicted by its equations 1 and 2. ``assumption`` ``bounded``:
engines sample with the version before it as far as the staleness bound allows, as the ledger does; predicted by
`trainer_node.scheduling.overlap.bubble_ratio_within`. ``needed``: the least number of workers without a bubble by that
prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netem.emulation.tables import bounded, filled, not_empty
from netem.rollouts.rollout_simulator import simulate_run
from netem.rollouts.simulated_run import BroadcastDelay, Machine, Samples, SimulatedRun, mean_tokens
from p2pcast.ground.errors import UsageError
from trainer_node.scheduling.overlap import (
    RolloutPace,
    bubble_ratio,
    bubble_ratio_within,
    least_rollouts_per_s,
    least_rollouts_per_s_within,
)

NEWEST, BOUNDED = "newest", "bounded"


@dataclass(frozen=True, slots=True)
class Parameters:
    """``staleness``: S; κ is the default for it. ``rollouts_per_s``: of a worker at paper scale. ``groups``, ``slots``:
    scaled down together by ``scale``, so that all times stay those of the paper.
    """

    staleness: int = 3
    assumption: str = BOUNDED
    workers: tuple[int, ...] = (4, 6, 8)
    train_s: float = 1600.0
    broadcast_s: float = 1437.0
    groups: int = 128
    size: int = 16
    rollouts_per_s: float = 0.29
    slots: int = 32
    scale: int = 16
    median: float = 1600.0
    spread: float = 0.67
    most: int = 8192
    steps: int = 40
    warm_up: int = 12

    def check(self) -> None:
        not_empty(self, "workers")
        bounded(
            self, staleness=(0, 100), workers=(1, 1000), train_s=(0.1, 1e6), broadcast_s=(0, 1e6), groups=(1, 10_000),
            size=(2, 1000), rollouts_per_s=(1e-4, 1e4), slots=(1, 10_000), scale=(1, 1000), median=(1, 1e6),
            spread=(0, 3), most=(1, 1_000_000), steps=(2, 10_000), warm_up=(0, self.steps - 1),
        )  # fmt: skip
        if self.assumption not in (NEWEST, BOUNDED):
            raise UsageError(f"parameters.assumption is {self.assumption!r}: it must be {NEWEST} or {BOUNDED}")
        if self.groups % self.scale or self.slots % self.scale:
            raise UsageError(f"parameters.scale is {self.scale}: groups and slots must be multiples of it")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    pace = RolloutPace(given.train_s, given.broadcast_s, given.groups * given.size, max(1, given.staleness - 1))
    needed = needed_workers(given, pace)
    for workers in given.workers:
        yield {"row": row(given, pace, workers, needed)}


def needed_workers(given: Parameters, pace: RolloutPace) -> int | None:
    try:
        if given.assumption == NEWEST:
            return math.ceil(least_rollouts_per_s(pace) / given.rollouts_per_s)
        return math.ceil(least_rollouts_per_s_within(pace, given.staleness) / given.rollouts_per_s)
    except UsageError:
        return None


def row(given: Parameters, pace: RolloutPace, workers: int, needed: int | None) -> dict[str, Any]:
    capacity = workers * given.rollouts_per_s
    newest = given.assumption == NEWEST
    predicted = bubble_ratio(pace, capacity) if newest else bubble_ratio_within(pace, given.staleness, capacity)
    figures = simulate_run(run_of(given, pace, workers), workers)
    bubble = figures.bubble(given.warm_up)
    return {
        "staleness": given.staleness,
        "workers": workers,
        "every": pace.steps,
        "simulated": True,
        "needed": needed,
        "enough": needed is not None and workers >= needed,
        "predicted": round(predicted, 4),
        "bubble": round(bubble, 4),
        "off": round(abs(bubble - predicted), 4),
        "worst_staleness": figures.worst_staleness,
        "wasted": round(figures.wasted_share, 4),
        "deadlock": figures.deadlock,
    }


def run_of(given: Parameters, pace: RolloutPace, workers: int) -> SimulatedRun:
    samples = Samples(given.median, given.spread, given.most)
    each = given.rollouts_per_s * mean_tokens(samples) / given.slots
    machines = tuple(Machine(f"w{n}", given.slots // given.scale, each) for n in range(workers))
    return SimulatedRun(
        machines, BroadcastDelay(given.broadcast_s, first=1.0), given.train_s, given.groups // given.scale, given.size,
        given.steps, given.staleness, pace.steps, samples, newest_only=given.assumption == NEWEST, heartbeat_s=30.0,
    )  # fmt: skip
