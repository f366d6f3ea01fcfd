"""Trials of staleness: the demo's run with rollouts that are exactly LAG learner steps old, seed by seed.

    python -m examples.research.staleness_trials --seeds 8 --plot staleness.png
    python -m examples.research.staleness_trials --seeds 1 --vllm

Trials of one seed share the first model, its warm start and the prompts, so each lag is compared with the first one in
pairs. Compared is the mean reward over the last ``LAST`` steps. The interval is Student's, of the mean difference.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch

from examples.research.learning_trial import Trial
from examples.research.rl_margin import trial
from netem.fleet.rl_participants import RlOptions
from p2pcast.inspection.png_figure import blank, require_matplotlib, save

LAST: Final = 20
"""Learner steps at the end whose mean reward is compared."""
CONFIDENCE: Final = 0.9
SMOOTHED: Final = 10
"""Steps of the running mean in the plot."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of final rewards, ``lag`` less the first lag: mean, and the interval of the mean."""

    lag: int
    mean: float
    low: float
    high: float


def difference(lag: int, pairs: Sequence[tuple[float, float]]) -> Difference:
    """``pairs``: (final reward at the first lag, final reward at this lag) of each seed."""
    from scipy import stats

    found = [other - first for first, other in pairs]
    mean = statistics.mean(found)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * stats.sem(found))
    return Difference(lag, mean, mean - half, mean + half)


def final(one: Trial) -> float:
    """Mean reward over the last steps."""
    return statistics.mean(one.rewards[-LAST:])


def _run(job: tuple[int, int, int, bool]) -> tuple[int, int, Trial]:
    seed, lag, steps, live = job
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return seed, lag, trial(Path(folder), RlOptions(Path(), steps=steps), seed, lag=lag, live=live)


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=8, help="Number of trials of each lag.")
@click.option("--steps", type=click.IntRange(2 * LAST), default=100, help="Learner steps of a trial.")
@click.option(
    "--lag", "lags", type=click.IntRange(0), multiple=True, default=(0, 3, 11), show_default=True,
    help="Age of the rollouts' weights in learner steps; several times. The others are compared with the first.",
)  # fmt: skip
@click.option("--processes", type=click.IntRange(1), default=1, help="Trials at the same time.")
@click.option("--vllm", is_flag=True, help="Rollouts of a live vLLM server with broadcast weights.")
@click.option("--plot", type=click.Path(path_type=Path), help="PNG with the rewards of each lag.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON with the rewards of each trial.")
def main(
    seeds: int, steps: int, lags: Sequence[int], processes: int, vllm: bool, plot: Path | None, output: Path | None
) -> None:
    """Print final rewards and held-out rewards for each lag, and the differences from the first lag."""
    if plot is not None:
        require_matplotlib()
    ages = list(dict.fromkeys(lags))
    jobs = [(seed, lag, steps, vllm) for seed in range(1, seeds + 1) for lag in ages]
    trials: dict[int, dict[int, Trial]] = {lag: {} for lag in ages}
    with ExitStack() as stack:
        each: Callable[..., Iterable[tuple[int, int, Trial]]] = map
        if processes > 1:
            spawn = multiprocessing.get_context("spawn")
            each = stack.enter_context(ProcessPoolExecutor(processes, spawn)).map
        for seed, lag, found in each(_run, jobs):
            trials[lag][seed] = found
            held_out = " -> ".join(f"{reward:.3f}" for reward in found.held_out)
            click.echo(f"seed {seed}, lag {lag}: final reward {final(found):.4f}, held-out {held_out}")
    for lag in ages:
        rewards = [final(one) for one in trials[lag].values()]
        after = statistics.mean(one.held_out[1] for one in trials[lag].values())
        spread = f", sd {statistics.stdev(rewards):.4f}" if seeds > 1 else ""
        click.echo(f"lag {lag}: final reward mean {statistics.mean(rewards):.4f}{spread}, held-out {after:.4f}")
    for lag in ages[1:]:
        pairs = [(final(trials[ages[0]][seed]), final(one)) for seed, one in trials[lag].items()]
        if seeds == 1:  # an interval needs two
            click.echo(f"lag {lag} less lag {ages[0]}: {pairs[0][1] - pairs[0][0]:+.4f}")
            continue
        gap = difference(lag, pairs)
        interval = f"{gap.low:+.4f} to {gap.high:+.4f}"
        click.echo(f"lag {lag} less lag {ages[0]}: {gap.mean:+.4f}, {CONFIDENCE:.0%} interval {interval}")
    if output is not None:
        rows = [
            {"lag": lag, "seed": seed, "rewards": one.rewards, "held_out": one.held_out}
            for lag, by_seed in trials.items()
            for seed, one in by_seed.items()
        ]
        output.write_text(json.dumps({"steps": steps, "trials": rows}))
    if plot is not None:
        save(_figure(trials), plot)


def _figure(trials: dict[int, dict[int, Trial]]) -> Any:
    """Running means of the reward: a line for the mean over seeds, and a band from the lowest to the highest."""
    figure, ((axes,),) = blank(1, 1, width=7, height=4)
    for lag, by_seed in trials.items():
        rows = [_running_mean(one.rewards) for one in by_seed.values()]
        at = list(range(SMOOTHED, SMOOTHED + len(rows[0])))
        (line,) = axes.plot(at, [statistics.mean(column) for column in zip(*rows, strict=True)], label=f"lag {lag}")
        axes.fill_between(
            at,
            [min(column) for column in zip(*rows, strict=True)],
            [max(column) for column in zip(*rows, strict=True)],
            color=line.get_color(),
            alpha=0.12,
            linewidth=0,
        )
    axes.set_xlabel("learner step")
    axes.set_ylabel(f"reward, mean of {SMOOTHED} steps")
    axes.legend()
    return figure


def _running_mean(rewards: Sequence[float]) -> list[float]:
    return [statistics.mean(rewards[end - SMOOTHED : end]) for end in range(SMOOTHED, len(rewards) + 1)]


if __name__ == "__main__":
    main()
