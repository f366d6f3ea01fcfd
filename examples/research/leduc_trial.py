"""How well a learner plays Leduc poker: seeded trials with own sampling, against the task's random opponent.

    python -m examples.research.leduc_trial --seeds 3
    python -m examples.research.leduc_trial --seeds 1 --vllm

A small model learns the rules from demonstrations of a random player, then trains with GRPO, on rollouts of its own
sampler or of a live vLLM. It plays held-out deals in both seats, sampled as in training. A uniform player draws each
action among the legal ones, and plays the same hands. The interval is Student's, of the mean difference between the two
on a deal.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import click
import torch

from examples.research.learning_trial import HELD_OUT_SEED, Answer, Trial, TrialOptions, run_trial
from examples.research.live_trial import live_engine
from netem.fleet.small_model import make_small_model
from p2pcast.tasks.leduc import Leduc, LeducHand
from p2pcast.tasks.poker_task import PLAYERS, deal_of
from p2pcast.tasks.seeded_draws import draw_below
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, OptimizerTable, SftTable, TrainTable

HELD_OUT_PERCENT: Final = 20
CONFIDENCE: Final = 0.95
WARM_UP_STEPS: Final = 10


@dataclass(frozen=True, slots=True)
class Score:
    """Chips a hand: of the model, of the uniform player, and their difference with the ends of its interval.
    ``legal``: share of the model's hands without a forfeit.
    """

    chips: float
    uniform: float
    gain: float
    low: float
    high: float
    legal: float


def trial(
    folder: Path, seed: int, *, steps: int, sft: int, lr: float, lag: int, deals: int, live: bool = False
) -> Trial:
    """One run. ``deals``: held-out deals, each in both seats. ``sft``: steps on demonstrations. ``live``: rollouts of a
    live vLLM.
    """
    task = Leduc(held_out=HELD_OUT_PERCENT)
    base = make_small_model(folder / f"model-{seed}", task.vocabulary, seed=seed, dtype="bfloat16")
    config = LearnerConfig(
        model=ModelTable(base, compute="float32"),
        train=TrainTable(seed=seed, packing="padded"),
        optimizer=OptimizerTable(lr=lr, warmup_steps=WARM_UP_STEPS),
        sft=SftTable(steps=sft),
    )
    options = TrialOptions(steps, lag=lag, problems=PLAYERS * deals, seed=seed)
    with live_engine(folder / f"live-{seed}", base, task) if live else nullcontext() as engine:
        return run_trial(config, task, options, engine)


def uniform_chips(deals: int, seed: int) -> list[float]:
    """Chips of the uniform player in the hands of a trial's evaluation, in their order."""
    jobs = islice(Leduc(held_out=HELD_OUT_PERCENT).evaluation_jobs(HELD_OUT_SEED), PLAYERS * deals)
    chips = []
    for number, job in enumerate(jobs):
        hand, turn = LeducHand(*deal_of(job.prompt)), 0
        while not hand.over:
            legal = hand.legal
            hand.act([legal[draw_below(len(legal), "uniform player", seed, number, turn)]])
            turn += 1
        chips.append(hand.chips)
    return chips


def score(answers: Sequence[Answer], uniform: Sequence[float]) -> Score:
    """Of equally many hands; both seats of a deal follow each other and count as one sample."""
    from scipy import stats

    chips = [one.reward for one in answers]
    gains = [
        statistics.mean(chips[first + seat] - uniform[first + seat] for seat in range(PLAYERS))
        for first in range(0, len(chips), PLAYERS)
    ]
    gain = statistics.mean(gains)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1) * stats.sem(gains))
    legal = statistics.mean(("forfeit", "no") in one.tags for one in answers)
    return Score(statistics.mean(chips), statistics.mean(uniform), gain, gain - half, gain + half, legal)


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=3, help="Number of trials.")
@click.option("--steps", type=click.IntRange(1), default=200, help="Learner steps of a trial.")
@click.option("--sft", type=click.IntRange(0), default=100, help="Steps on demonstrations before.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=3e-4, help="Learning rate.")
@click.option("--lag", type=click.IntRange(0), default=1, help="Age of the rollouts' weights in learner steps.")
@click.option("--deals", type=click.IntRange(2), default=2000, help="Held-out deals, each played in both seats.")
@click.option("--vllm", is_flag=True, help="Rollouts of a live vLLM server with broadcast weights.")
def main(seeds: int, steps: int, sft: int, lr: float, lag: int, deals: int, vllm: bool) -> None:
    """Print chips a hand on held-out deals, before and after training, and the gain over a uniform player."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            found = trial(Path(folder), seed, steps=steps, sft=sft, lr=lr, lag=lag, deals=deals, live=vllm)
            uniform = uniform_chips(deals, seed)
            for name, answers in (("before", found.before), ("after", found.after)):
                one = score(answers, uniform)
                click.echo(
                    f"seed {seed}, {name}: {one.chips:+.3f} chips a hand, uniform {one.uniform:+.3f}, gain"
                    f" {one.gain:+.3f}, {CONFIDENCE:.0%} interval {one.low:+.3f} to {one.high:+.3f}, legal hands"
                    f" {one.legal:.2%}"
                )


if __name__ == "__main__":
    main()
