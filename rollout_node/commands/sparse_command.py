"""``p2pcast sparse``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.inspection.png_figure import require_matplotlib
from p2pcast.sparse import budget_schedule
from p2pcast.sparse.acceptance_rate import BIN_TOKENS
from p2pcast.sparse.budget_calibration import LADDER, Calibration
from p2pcast.sparse.budget_guard import TARGET
from p2pcast.sparse.budget_schedule import BudgetSchedule


@click.group()
def sparse() -> None:
    """Sparse attention for rollouts.

    \b
    Example:
      p2pcast sparse calibrate Qwen3-4B --prompts prompts.jsonl --schedule sparse_attention.json
    """


@sparse.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="JSON lines, each with `text` or `token_ids`.",
)
@click.option(
    "--schedule",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(budget_schedule.FILE),
    help="File for the schedule; lies among a version's files.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of percentiles by position.")
@click.option(
    "--target",
    type=click.FloatRange(0, 1, max_open=True),
    default=TARGET,
    help="Least 5th percentile of the acceptance rate in each bin.",
)
@click.option("--tokens", type=click.IntRange(2), default=32_000, help="Most tokens of an answer.")
@click.option(
    "--budget",
    "budgets",
    type=click.IntRange(1),
    multiple=True,
    default=LADDER,
    help="Pages of 16 tokens of a budget to try; may be repeated.",
)
@click.option("--bin-tokens", type=click.IntRange(16), default=BIN_TOKENS, help="Positions of a bin.")
@click.option(
    "--candidates", type=click.IntRange(1), default=20, help="Most probable tokens that are compared at each position."
)
@click.option(
    "--block-size",
    type=click.IntRange(16),
    default=16,
    help="Tokens of a page of the engine's cache; at least 32 on a CPU.",
)
@click.option("--at-once", type=click.IntRange(1), default=32, help="Answers that the engine samples at once.")
@documented
def calibrate(
    model: Path,
    prompts: Path,
    schedule: Path,
    plot: Path | None,
    target: float,
    tokens: int,
    budgets: tuple[int, ...],
    bin_tokens: int,
    candidates: int,
    block_size: int,
    at_once: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find the smallest budget of each bin of positions whose acceptance rates hold the target.

    An engine on this machine samples answers with each budget; dense attention scores them. MODEL is a folder.
    """
    from rollout_node.sparse_calibration.model_calibration import calibrated, plot_percentiles, prompts_of_file

    if plot is not None:
        require_matplotlib()
    for file in (schedule, plot, output):
        # Check first: the measurement takes hours, and would otherwise be lost.
        if file is not None and not os.access(file.absolute().parent, os.W_OK):
            raise UsageError(f"{file}: the folder of this file is missing, or nothing can be written there")
    found = calibrated(
        model, prompts_of_file(prompts), sorted(set(budgets)), tokens=tokens, bin_tokens=bin_tokens,
        candidates=candidates, block_size=block_size, at_once=at_once,
    )  # fmt: skip
    made = found.schedule(target)
    try:
        atomic_write(schedule, made.to_bytes())
    except OSError as error:
        raise LocalError(f"{schedule}: {error.strerror or error}") from None
    if plot is not None:
        plot_percentiles(found, target, plot)
    document = calibration_document(found, made, target)
    if written(document, output, as_json=as_json):
        return
    console().print(percentile_table(found, made, f"target {target}; schedule in {schedule}"))


def calibration_document(found: Calibration, made: BudgetSchedule, target: float) -> dict[str, Any]:
    rows = [row._asdict() for row in found.rows()]
    means = {str(pages): found.mean(pages) for pages in found.budgets}
    tails = {str(pages): tail and tail._asdict() for pages in found.budgets for tail in [found.tail(pages)]}
    return {"target": target, "schedule": made.document(), "rows": rows, "means": means, "tails": tails}


def percentile_table(found: Calibration, made: BudgetSchedule, title: str) -> Table:
    numbers = sorted({row.number for row in found.rows()})
    table = Table(title=f"5th percentile of the acceptance rate; {title}")
    for heading in ("pages", "mean", *(f"from {number * found.bin_tokens}" for number in numbers)):
        table.add_column(heading, justify="right")
    by_place = {(row.pages, row.number): row for row in found.rows()}
    for pages in found.budgets:
        cells = [by_place.get((pages, number)) for number in numbers]
        mean = found.mean(pages)
        table.add_row(
            str(pages),
            "–" if mean is None else f"{mean:.3f}",
            *("–" if cell is None or cell.percentile is None else f"{cell.percentile:.3f}" for cell in cells),
        )
    chosen = [made.value(number) for number in numbers]
    table.add_row("chosen", "", *("all" if value == budget_schedule.DENSE else str(value) for value in chosen))
    return table
