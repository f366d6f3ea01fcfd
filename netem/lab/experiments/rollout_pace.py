"""The pace rule in simulation: for each κ up to S + 1, waiting, waste and staleness. No network; all rows simulated.

Workers of unlike speed, stragglers (samples that take ``straggler_factor`` times as long) and groups with equal rewards
(``equal``), which are dropped and played again. One worker slows down and one dies in mid-run. The learner's step takes
``load`` of the time that the fleet needs for a batch's rollouts, dropped ones included. A wasted rollout was sampled,
and neither trained nor dropped for equal rewards: stale, superseded, lost with its worker or left over at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
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


@dataclass(frozen=True, slots=True)
class Parameters:
    """``staleness``: S. ``workers``: their speeds go from ``tokens_per_s`` a slot to ``unlike`` times as much.
    ``broadcast``: T_bcast ÷ T_train. ``load``: T_train ÷ time of a batch's rollouts. ``seeds``: runs a row.
    """

    staleness: int = 3
    stragglers: float = 0.02
    straggler_factor: float = 8.0
    equal: float = 0.3
    workers: int = 8
    slots: int = 4
    tokens_per_s: float = 50.0
    unlike: float = 3.0
    groups: int = 16
    size: int = 8
    steps: int = 40
    broadcast: float = 0.25
    load: float = 1.1
    seeds: int = 3

    def check(self) -> None:
        bounded(
            self, staleness=(0, 100), stragglers=(0, 1), straggler_factor=(1, 1000), equal=(0, 0.9), workers=(2, 1000),
            slots=(1, 1000), tokens_per_s=(0.1, 1e5), unlike=(1, 100), groups=(1, 1000), size=(2, 1000),
            steps=(10, 10_000), broadcast=(0, 100), load=(0.01, 100), seeds=(1, 100),
        )  # fmt: skip


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    for every in range(1, given.staleness + 2):
        run = run_of(given, every)
        yield {"row": row(every, [simulate_run(run, seed) for seed in range(given.seeds)])}


def run_of(given: Parameters, every: int) -> SimulatedRun:
    last = given.workers - 1
    machines = tuple(
        Machine(f"w{n}", given.slots, given.tokens_per_s * (1 + (given.unlike - 1) * n / last))
        for n in range(given.workers)
    )
    samples = Samples(stragglers=given.stragglers, straggler_factor=given.straggler_factor, equal=given.equal)
    played = given.groups * given.size / (1 - given.equal)
    train_s = given.load * played * mean_tokens(samples) / tokens_per_s(machines)
    middle_s = given.steps * train_s / 2
    faults = (RolloutFault("worker slows", "w1", middle_s / 2), RolloutFault("worker dies", "w0", middle_s))
    broadcast = BroadcastDelay(given.broadcast * train_s)
    return SimulatedRun(
        machines, broadcast, train_s, given.groups, given.size, given.steps, given.staleness, every, samples,
        faults=faults,
    )  # fmt: skip


def row(every: int, runs: list[RunFigures]) -> dict[str, Any]:
    """The mean of several runs; of waste and staleness the worst."""
    warm_up = 2 * every
    return {
        "staleness": runs[0].run.staleness,
        "every": every,
        "simulated": True,
        "deadlocks": sum(run.deadlock for run in runs),
        "steps_per_h": round(3600 * fmean(run.steps_per_s for run in runs), 2),
        "bubble": round(fmean(run.bubble(warm_up) for run in runs), 4),
        "wasted": round(max(run.wasted_share for run in runs), 4),
        "filtered": round(fmean(run.filtered_share for run in runs), 4),
        "worst_staleness": max(run.worst_staleness for run in runs),
        "in_flight": round(fmean(mean(run.in_flight) for run in runs), 3),
        "in_queue": round(fmean(mean(run.in_queue) for run in runs), 3),
        "short_batches": sum(run.endings["short batches"] for run in runs),
        "histogram": " ".join(f"{at}:{share:.2f}" for at, share in shares(runs)),
    }


def mean(counts: Mapping[int, int]) -> float:
    whole = sum(counts.values())
    return sum(at * count for at, count in counts.items()) / whole if whole else 0.0


def shares(runs: list[RunFigures]) -> list[tuple[int, float]]:
    """Share of trained results by staleness, over all runs."""
    whole = sum(sum(run.staleness.values()) for run in runs)
    steps = sorted({at for run in runs for at in run.staleness})
    return [(at, sum(run.staleness[at] for run in runs) / whole) for at in steps]
