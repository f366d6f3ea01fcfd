"""Jobs for machines of unlike speed, in simulation: equal shares against SparrowRL's Algorithm 1, and against workers
that take jobs by themselves. No network; all rows simulated.

SparrowRL's section 7.6 serves a pool of four A100 and four L40. The paper does not give their speeds. Here an L40 makes
``slow_tokens_per_s``, the paper's uniform throughput divided by eight, and an A100 ``ratio`` times as much. If sampling
alone takes time, equal shares wait for the L40s, and shares by throughput win at most (ratio + 1) ÷ 2 (``ideal``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from netem.emulation.tables import bounded, filled
from netem.rollouts.rollout_simulator import simulate_run
from netem.rollouts.simulated_run import (
    POLICIES,
    BroadcastDelay,
    Machine,
    Policy,
    Samples,
    SimulatedRun,
    fleet,
    mean_tokens,
    tokens_per_s,
)
from p2pcast.ground.errors import UsageError

ANSWERS = {"short": Samples(250.0, 0.4, 1024), "long": Samples(2500.0, 0.8, 8192)}
"""Lengths of samples like GSM8K's and like DeepScaleR's."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``answers``: of ``ANSWERS``. ``slots``: samples that an engine takes at once; ``saturated`` of them sample at its
    full rate, more share it. ``train``: a learner step ÷ the time in which the whole pool samples a batch.
    """

    answers: str = "short"
    ratio: float = 1.7
    slow_tokens_per_s: float = 1300.0
    slots: int = 8
    saturated: int = 8
    groups: int = 128
    size: int = 8
    train: float = 0.3
    staleness: int = 1
    steps: int = 16
    warm_up: int = 4
    seeds: int = 2
    policies: tuple[str, ...] = ("uniform", "fixed shares", "shares", "pull")

    def check(self) -> None:
        bounded(
            self, ratio=(1, 100), slow_tokens_per_s=(1, 1e6), slots=(1, 1000), saturated=(1, 1000), groups=(1, 10_000),
            size=(2, 1000),
            train=(0.001, 100), staleness=(0, 100), steps=(2, 10_000), warm_up=(0, self.steps - 1), seeds=(1, 100),
        )  # fmt: skip
        if self.answers not in ANSWERS:
            raise UsageError(f"parameters.answers is {self.answers!r}: it must be one of {', '.join(ANSWERS)}")
        if wrong := [policy for policy in self.policies if policy not in POLICIES]:
            raise UsageError(f"parameters.policies: {wrong[0]!r} is none of {', '.join(POLICIES)}")
        if "uniform" not in self.policies:
            raise UsageError("parameters.policies: the other policies are compared with uniform")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    rates = {name: fmean(rate(given, name, seed) for seed in range(given.seeds)) for name in given.policies}
    for policy in given.policies:
        yield {
            "row": {
                "policy": policy,
                "simulated": True,
                "tokens_per_s": round(rates[policy], 1),
                "gain": round(rates[policy] / rates["uniform"] - 1, 4),
                "ideal": round((given.ratio + 1) / 2 - 1, 4),
                "of_capacity": round(rates[policy] / (4 * given.slow_tokens_per_s * (1 + given.ratio)), 4),
            }
        }


def rate(given: Parameters, policy: str, seed: int) -> float:
    """Trained tokens a second after the first ``warm_up`` steps."""
    forms = {
        kind: Machine("", given.slots, whole / given.saturated, kind, most_tokens_per_s=whole)
        for kind, whole in (("l40", given.slow_tokens_per_s), ("a100", given.slow_tokens_per_s * given.ratio))
    }
    named: Policy = policy  # type: ignore[assignment]
    machines, samples = fleet({"a100": 4, "l40": 4}, forms), ANSWERS[given.answers]
    train_s = given.train * given.groups * given.size * mean_tokens(samples) / tokens_per_s(machines)
    run = SimulatedRun(
        machines, BroadcastDelay(train_s / 4), train_s, given.groups, given.size, given.steps, given.staleness,
        max(1, given.staleness - 1), samples, policy=named,
    )  # fmt: skip
    figures = simulate_run(run, seed)
    seconds = figures.applied_s[-1] - figures.applied_s[given.warm_up - 1] if given.warm_up else figures.wall_s
    return figures.tokens["trained"] * (1 - given.warm_up / given.steps) / seconds
