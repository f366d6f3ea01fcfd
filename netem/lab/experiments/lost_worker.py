"""A worker lost in mid-batch, in simulation: the time until other workers have done its jobs, against the length of
leases. No network; all rows simulated.

SparrowRL's section 5.4: a lease lasts two to three times the median completion. ``renewal`` has three kinds. Heartbeats
with new tokens extend a lease by its own length (p2pcast), or by the time of four heartbeats. Or a lease lasts once its
multiple and no longer (``none``, as in the paper). A lease that ends while its worker is at work repeats the job
needlessly. Lost jobs whose group is trained without them, on its last step, are not done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from netem.emulation.tables import bounded, filled
from netem.rollouts.rollout_simulator import simulate_run
from netem.rollouts.run_figures import RunFigures
from netem.rollouts.simulated_run import (
    BroadcastDelay,
    Machine,
    RolloutFault,
    Samples,
    SimulatedRun,
    mean_tokens,
    tokens_per_s,
)
from p2pcast.ground.errors import UsageError

RENEWALS = {"heartbeats": (True, 0), "four heartbeats": (True, 4), "none": (False, 0)}
"""Name → whether heartbeats renew a lease, and by how many heartbeats; 0: by the lease's own length."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``factor``: lease ÷ median completion. ``spread``: of the logarithm of lengths. ``seeds``: losses a row."""

    factor: float = 2.5
    renewal: str = "heartbeats"
    workers: int = 8
    slots: int = 16
    tokens_per_s: float = 60.0
    median: float = 1200.0
    spread: float = 0.6
    most: int = 8192
    groups: int = 32
    size: int = 8
    staleness: int = 3
    steps: int = 20
    heartbeat_s: float = 5.0
    seeds: int = 10

    def check(self) -> None:
        bounded(
            self, factor=(1, 100), workers=(2, 1000), slots=(1, 1000), tokens_per_s=(0.1, 1e5), median=(1, 1e6),
            spread=(0, 3), most=(1, 1_000_000), groups=(1, 1000), size=(2, 1000), staleness=(0, 100), steps=(6, 10_000),
            heartbeat_s=(0.1, 1000), seeds=(1, 1000),
        )  # fmt: skip
        if self.renewal not in RENEWALS:
            raise UsageError(f"parameters.renewal is {self.renewal!r}: it must be one of {', '.join(RENEWALS)}")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    runs = [lost(given, seed) for seed in range(given.seeds)]
    calm = [lost(given, seed, dies=False) for seed in range(given.seeds)]
    redone = sorted(seconds for run in runs for seconds in run.redone_s)
    made = sum(run.endings["accepted"] for run in runs)
    yield {
        "row": {
            "simulated": True,
            "median_sample_s": round(given.median / given.tokens_per_s, 1),
            "lost_jobs": sum(run.lost_jobs for run in runs),
            "redone_jobs": len(redone),
            "redone_median_s": round(median(redone), 1) if redone else None,
            "redone_last_s": round(fmean(max(run.redone_s, default=0.0) for run in runs), 1),
            "repeated": round(sum(run.repeated for run in runs) / made, 4),
            "wasted": round(fmean(run.wasted_share for run in runs), 4),
            "slower": round(fmean(run.wall_s for run in runs) / fmean(run.wall_s for run in calm) - 1, 4),
            "deadlocks": sum(run.deadlock for run in runs),
        }
    }


def lost(given: Parameters, seed: int, *, dies: bool = True) -> RunFigures:
    machines = tuple(Machine(f"w{n}", given.slots, given.tokens_per_s) for n in range(given.workers))
    samples = Samples(given.median, given.spread, given.most)
    train_s = given.groups * given.size * mean_tokens(samples) / tokens_per_s(machines)
    faults = (RolloutFault("worker dies", "w0", (given.steps / 2 + 0.37) * train_s),) if dies else ()
    run = SimulatedRun(
        machines, BroadcastDelay(train_s / 4), train_s, given.groups, given.size, given.steps, given.staleness,
        max(1, given.staleness - 1), samples, faults=faults, heartbeat_s=given.heartbeat_s, lease_factor=given.factor,
        renews=RENEWALS[given.renewal][0], renewal_beats=RENEWALS[given.renewal][1],
    )  # fmt: skip
    return simulate_run(run, seed)
