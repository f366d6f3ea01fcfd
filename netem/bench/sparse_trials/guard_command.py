"""``p2pcast bench guard``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.rollouts.top_logprobs import MAX_TOP_K
from p2pcast.sparse.budget_guard import FLOOR


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--task",
    default="recite,tokens=1024,phrases=16",
    metavar="NAME,KEY=VALUE",
    help="Task that the model has learnt, as of `p2pcast ledger --task`.",
)
@click.option("--longest", type=click.IntRange(64), default=1088, help="Tokens of a prompt and its answer together.")
@click.option("--pages", type=click.IntRange(1), default=1, help="Pages of 16 tokens of the first budget.")
@click.option("--bin-tokens", type=click.IntRange(16), default=512, help="Positions of a bin.")
@click.option("--block-size", type=click.IntRange(16), default=32, help="Tokens of a page of the engine's cache.")
@click.option("--steps", type=click.IntRange(4), default=24, help="Learner steps of each run.")
@click.option("--groups", type=click.IntRange(1), default=4, help="Prompts of a batch.")
@click.option("--group-size", type=click.IntRange(2), default=8, help="Rollouts of a prompt.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-5, help="Learning rate.")
@click.option(
    "--floor",
    type=click.FloatRange(0, 0.86),
    default=FLOOR,
    help="5th percentile below which the guard makes a bin dense at once, in place of twice the pages.",
)
@click.option(
    "--guard-tokens",
    type=click.IntRange(1, MAX_TOP_K),
    default=64,
    help="Most probable tokens of a position that the guard compares; a small model's tail is long.",
)
@click.option("--dir", "folder", type=PATH, default="bench-out/guard", help="Work folder; replaces an earlier one.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of rewards and percentiles by step.")
@documented
def guard(
    model: Path,
    task: str,
    longest: int,
    pages: int,
    bin_tokens: int,
    block_size: int,
    steps: int,
    groups: int,
    group_size: int,
    lr: float,
    floor: float,
    guard_tokens: int,
    folder: Path,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Train MODEL twice with a budget of sparse attention that is far too small: without the guard, and with it.

    Exit code 1: the 5th percentile of the acceptance rate rose to 0.75 without the guard, or did not end at the target
    with it.
    """
    from netem.bench.sparse_trials.guard_runs import GuardRunOptions, guard_runs
    from p2pcast.inspection.png_figure import require_matplotlib

    if plot is not None:
        require_matplotlib()
    options = GuardRunOptions(
        folder=folder, model=model, task=task, longest=longest, pages=pages, bin_tokens=bin_tokens,
        block_size=block_size, steps=steps, groups=groups, group_size=group_size, lr=lr, floor=floor,
        guard_tokens=guard_tokens,
    )  # fmt: skip
    document = guard_runs(options, plot)
    if not written(document, output, as_json=as_json):
        _print(document)
    if document["verdict"] != "PASS":
        sys.exit(EXIT_FAILED)


def _print(document: dict[str, Any]) -> None:
    out = console()
    without, guarded = (document["runs"][name] for name in ("without", "with"))
    table = Table(title=document["verdict"])
    for title in ("step", "reward without", "5th percentile without", "reward with", "5th percentile with"):
        table.add_column(title, justify="right")
    for step in range(max(len(without["rewards"]), len(guarded["rewards"]))):
        cells = [run[key][step : step + 1] for run in (without, guarded) for key in ("rewards", "percentiles")]
        table.add_row(str(step + 1), *(_cell(*cell) for cell in cells))
    out.print(table)
    for name, run in document["runs"].items():
        if run["gave_up"] is not None:
            click.echo(f"{name} the guard: {run['gave_up']}")
    for change in guarded["budgets"]:
        after = "all pages" if change["after"] is None else f"{change['after']} pages"
        out.print(f"step {change['step']}: bin {change['bin']} gets {after}, at {change['percentile']:.3f}")
    back = guarded["results_until_target"]
    out.print("never at the target" if back is None else f"at the target after {back} results")


def _cell(value: float | None = None) -> str:
    return "" if value is None else f"{value:.3f}"
