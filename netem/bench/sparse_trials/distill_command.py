"""``p2pcast bench distill``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.inspection.png_figure import blank, require_matplotlib, save
from p2pcast.sparse.budget_schedule import BudgetSchedule

DRAWN: Final = 4000
"""Prompts of task recite to train on."""


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with `token_ids`, all of one length. Default: prompts of task recite.",
)
@click.option("--length", type=click.IntRange(64), default=512, help="Tokens of a prompt of task recite.")
@click.option("--phrases", type=click.IntRange(1, 64), default=8, help="Different phrases of such a prompt.")
@click.option("--held-out", type=click.IntRange(1), default=48, help="Prompts at the file's end that are measured.")
@click.option("--tokens", type=click.IntRange(2), default=32, help="Tokens of an answer.")
@click.option("--pages", type=click.IntRange(1), default=5, help="Budget of the training, in pages besides the three.")
@click.option("--budget", "budgets", type=click.IntRange(1), multiple=True, help="Another measured budget; repeatable.")
@click.option("--block-size", type=click.IntRange(1), default=16, help="Tokens of a page of the cache.")
@click.option("--steps", type=click.IntRange(1), default=60, help="Updates of the adapter.")
@click.option("--batch", type=click.IntRange(1), default=16, help="Answers of one update.")
@click.option("--rank", type=click.IntRange(1), default=16, help="Rank of the adapter.")
@click.option(
    "--alpha", type=float, default=16.0, help="Scale of the adapter: its product is multiplied by alpha / rank."
)
@click.option("--lr", type=float, default=3e-3, help="Learning rate of the adapter.")
@click.option("--seed", type=int, default=0, help="Seed of answers and adapter.")
@click.option("--plot", type=PATH, metavar="FILE.png", help="File for a plot of the percentiles by budget.")
@documented
def distill(
    model: Path,
    prompts: Path | None,
    length: int,
    phrases: int,
    held_out: int,
    tokens: int,
    pages: int,
    budgets: tuple[int, ...],
    block_size: int,
    steps: int,
    batch: int,
    rank: int,
    alpha: float,
    lr: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Train the adapter of rollouts on answers of MODEL, and measure acceptance rates before and after, at equal
    budgets, on other prompts.
    """
    from netem.bench.sparse_trials.distilled_tail import (
        TailOptions,
        bench_distill,
        prompts_of_recite,
        token_ids_of_file,
    )

    if plot is not None:
        require_matplotlib()
    drawn = prompts_of_recite(length, phrases, held_out + DRAWN) if prompts is None else token_ids_of_file(prompts)
    found = bench_distill(
        TailOptions(
            model=model, prompts=drawn, held_out=held_out, tokens=tokens, pages=pages, budgets=budgets,
            page_tokens=block_size, steps=steps, batch=batch, rank=rank, alpha=alpha, lr=lr, seed=seed,
        )
    )  # fmt: skip
    if plot is not None:
        _draw(found["rows"], plot)
    if written(found, output, as_json=as_json):
        return
    table = Table(title=f"acceptance rates before → after {steps} steps at {_budget_tokens(pages)} tokens")
    for title in ("budget, tokens", "measured tokens", "5th percentile", "mean", "KL, nats"):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        pairs = [f"{row[f'{key}_before']:.3f} → {row[f'{key}_after']:.3f}" for key in ("percentile", "mean", "kl")]
        table.add_row(str(_budget_tokens(row["pages"])), str(row["tokens"]), *pairs)
    console().print(table)


def _budget_tokens(pages: int) -> int:
    return BudgetSchedule((pages,)).budget_tokens(0)


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    figure, ((axes,),) = blank(1, 1, width=6.4, height=4)
    budgets = [_budget_tokens(row["pages"]) for row in rows]
    for name, colour in (("before", "gray"), ("after", "tab:blue")):
        axes.plot(budgets, [row[f"percentile_{name}"] for row in rows], marker="o", color=colour, label=name)
    axes.set_xlabel("budget, tokens")
    axes.set_ylabel("5th percentile of the acceptance rate")
    axes.legend()
    save(figure, file)
