"""By how much the reward of the demo rises: seeded trials of its run with own sampling, for the verdict's margin.

    python -m examples.research.rl_margin --seeds 20

The margin is the mean less four standard deviations (docs/notes/rl-demo.md). Rollouts have the greatest age that the
demo allows; in the demo most are younger.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click
import torch

from examples.research.learning_trial import Trial, TrialOptions, run_trial
from examples.research.live_trial import live_engine
from netem.fleet.rl_participants import TASK, VOCABULARY, RlOptions
from netem.fleet.small_model import make_small_model
from netem.rl_demo.rl_verdict import COMPARED
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, OptimizerTable, SftTable, TrainTable


def trial(folder: Path, options: RlOptions, seed: int, *, lag: int | None = None, live: bool = False) -> Trial:
    """One run of the demo's configuration and first model, without its quiet steps. ``seed``: of prompts and rollouts.
    ``lag``: None for the demo's bound. ``live``: rollouts of a live vLLM.
    """
    base = make_small_model(folder / str(seed), VOCABULARY, seed=options.seed, dtype="bfloat16")
    config = LearnerConfig(
        model=ModelTable(base, compute="float32"),
        train=TrainTable(seed=options.seed, packing="padded"),
        optimizer=OptimizerTable(lr=options.lr, warmup_steps=options.lr_warmup_steps),
        sft=SftTable(steps=options.sft),
    )
    task = load_task(TASK)
    assert isinstance(task, Sums)
    age = options.staleness if lag is None else lag
    size = TrialOptions(options.steps, options.groups, options.group_size, lag=age, seed=seed)
    with live_engine(folder / "live", base, task) if live else nullcontext() as engine:
        return run_trial(config, task, size, engine)


@click.command()
@click.option("--seeds", type=click.IntRange(2), default=20, help="Number of trials.")
@click.option("--first", type=click.IntRange(0), default=1, help="Seed of the first trial.")
@click.option(
    "--steps", type=click.IntRange(2 * COMPARED), default=RlOptions(Path()).steps, help="Learner steps of a trial."
)
def main(seeds: int, first: int, steps: int) -> None:
    """Print the rise of the reward in each trial, their mean and standard deviation, and the margin."""
    torch.set_num_threads(1)
    options = RlOptions(Path(), steps=steps)
    rises = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + seeds):
            found = trial(Path(folder), options, seed)
            rises.append(found.rise(COMPARED))
            held_out = " -> ".join(f"{reward:.3f}" for reward in found.held_out)
            click.echo(f"seed {seed}: rise {rises[-1]:+.4f}, held-out {held_out}")
    mean, spread = statistics.mean(rises), statistics.stdev(rises)
    click.echo(f"{seeds} trials of {steps} steps: mean {mean:.4f}, sd {spread:.4f}, margin {mean - 4 * spread:.4f}")


if __name__ == "__main__":
    main()
