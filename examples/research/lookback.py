"""Acceptance rates of sparse attention by budget and length, of the small model that looks far back: ``python -m
examples.research.lookback``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import click

from examples.research.lookback_model import train_lookback, write_lookback
from p2pcast.cli import exit_code
from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.inspection.png_figure import require_matplotlib
from p2pcast.sparse.budget_calibration import Calibration
from p2pcast.sparse.budget_guard import TARGET
from p2pcast.tasks.trial_tasks.recite import Recite
from rollout_node.commands.sparse_command import calibration_document, percentile_table
from rollout_node.sparse_calibration.model_calibration import calibrated, plot_percentiles

logger = logging.getLogger("p2pcast.bench")

SEED: Final = 900
"""Of the prompts: unlike those of the training."""
CANDIDATES: Final = 128
"""Most probable tokens of a position: enough for nearly its whole distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookbackOptions:
    """``folder``: of the model, which is trained if the folder is missing. ``lengths``: of the prompts, in tokens.
    ``samples``: prompts of each length. ``asked``: phrases of an answer. ``phrases``: different ones of a prompt.
    ``budgets``: constant ones, in pages of 16 tokens.
    """

    folder: Path
    lengths: Sequence[int]
    samples: int
    asked: int
    phrases: int
    budgets: Sequence[int]
    bin_tokens: int
    block_size: int
    at_once: int


def bench_lookback(options: LookbackOptions) -> Calibration:
    """Raises UsageError for lengths that the task refuses, and LocalError when the engine fails."""
    tasks = [Recite(tokens, options.asked, options.phrases) for tokens in options.lengths]
    prompts = [
        task.drawn(one.prompt).prompt.tolist() for task in tasks for one in islice(task.jobs(SEED), options.samples)
    ]
    if not options.folder.exists():
        logger.info("training a model for %s", options.folder)
        write_lookback(options.folder, train_lookback())
    return calibrated(
        options.folder,
        prompts,
        options.budgets,
        tokens=tasks[0].answer_tokens,
        bin_tokens=options.bin_tokens,
        candidates=CANDIDATES,
        block_size=options.block_size,
        at_once=options.at_once,
    )


@click.command()
@click.option(
    "--folder", type=PATH, default="bench-out/lookback", help="Folder of the model; trained if the folder is missing."
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1024),
    multiple=True,
    default=(2048, 4096),
    help="Tokens of a prompt; may be repeated.",
)
@click.option("--samples", type=click.IntRange(1), default=24, help="Prompts of each length.")
@click.option("--asked", type=click.IntRange(1), default=8, help="Phrases of an answer, of 8 tokens each.")
@click.option("--phrases", type=click.IntRange(1, 64), default=16, help="Different phrases of a prompt.")
@click.option(
    "--budget",
    "budgets",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 5, 13, 29, 61, 93, 125),
    help="Pages of 16 tokens of a budget, besides the reserved three; may be repeated.",
)
@click.option(
    "--target",
    type=click.FloatRange(0, 1, max_open=True),
    default=TARGET,
    help="Least 5th percentile of the acceptance rate in each bin.",
)
@click.option("--bin-tokens", type=click.IntRange(16), default=512, help="Positions of a bin.")
@click.option("--block-size", type=click.IntRange(16), default=32, help="Tokens of a page of the engine's cache.")
@click.option("--at-once", type=click.IntRange(1), default=8, help="Answers that the engine samples at once.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of percentiles by position.")
@documented
def lookback(
    folder: Path,
    lengths: tuple[int, ...],
    samples: int,
    asked: int,
    phrases: int,
    budgets: tuple[int, ...],
    target: float,
    bin_tokens: int,
    block_size: int,
    at_once: int,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the acceptance rate of sparse attention by budget and length, for a small model of task recite.

    Each phrase of an answer stands at several places of the whole prompt. The model is trained first, in minutes.
    """
    if plot is not None:
        require_matplotlib()
    options = LookbackOptions(
        folder=folder, lengths=lengths, samples=samples, asked=asked, phrases=phrases,
        budgets=sorted(set(budgets)), bin_tokens=bin_tokens, block_size=block_size, at_once=at_once,
    )  # fmt: skip
    found = bench_lookback(options)
    made = found.schedule(target)
    if plot is not None:
        plot_percentiles(found, target, plot)
    if not written(calibration_document(found, made, target), output, as_json=as_json):
        console().print(percentile_table(found, made, f"{samples} prompts of each length, answers of {asked} phrases"))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: lookback(standalone_mode=False)))
