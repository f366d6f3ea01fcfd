"""``p2pcast bench squash``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, console, documented, write_document, written
from p2pcast.inspection.png_figure import blank, plain, require_matplotlib, save

log = logging.getLogger("p2pcast.bench")


@click.command("squash")
@click.argument("checkpoints", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--versions", type=click.IntRange(1), default=100, help="Greatest number of deltas to squash.")
@click.option(
    "--lr",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    help="Learning rate of the built-in training, without CHECKPOINTS; repeatable.  [default: 1e-6, 3e-6]",
)
@click.option("--plot", type=PATH, metavar="FILE.png", help="File for a plot of the sizes.")
@documented
def squash(
    checkpoints: Path | None,
    versions: int,
    rates: tuple[float, ...],
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the size of k deltas squashed into one, the time of squashing, and the bytes that a ladder of squashes
    saves late peers.

    CHECKPOINTS: a folder with a run's step_N folders. Without CHECKPOINTS, the data are pretrained weights under real
    AdamW steps; training takes some minutes for each learning rate.
    """
    from netem.bench.codec_comparison import squash_cost as bench

    if plot is not None:
        require_matplotlib()
    runs = (
        iter([bench.folder_run(checkpoints)])
        if checkpoints is not None
        else bench.trained_runs(rates or bench.LEARNING_RATES)
    )
    document: dict[str, Any] = {"versions": versions, "rows": []}
    for run in runs:
        log.info("%s: up to %d versions", run.name, versions)
        document["rows"].append(bench.measure(run, versions))
        write_document(document, output)
    if plot is not None:
        draw(document, plot)
    if not written(document, output, as_json=as_json):
        _print(document)


def _print(document: dict[str, Any]) -> None:
    out = console()
    for row in document["rows"]:
        table = Table(title=f"{row['dataset']}: {row['params']:,} values, {row['dense_bytes']:,} bytes dense")
        for title in (
            "k",
            "changed",
            "codec",
            "chain",
            "squash",
            "÷ chain",
            "× dense",
            "squash s",
            "÷ replay",
            "catch up ÷ replay",
        ):
            table.add_column(title, justify="left" if title == "codec" else "right")
        for mark in row["rows"]:
            for codec in row["sizes"]:
                part = mark[codec]
                table.add_row(
                    str(mark["k"]),
                    f"{100 * mark['changed'] / row['params']:.2f} %",
                    codec,
                    f"{part['chain_bytes']:,}",
                    f"{part['squash_bytes']:,}",
                    f"{part['ratio']:.2f}",
                    f"{row['dense_bytes'] / part['squash_bytes']:.1f}" if part["squash_bytes"] else "–",
                    *(
                        f"{part[key]:.3f}" if key in part else "–"
                        for key in ("squash_s", "squash_to_replay", "catch_up_to_replay")
                    ),
                )
        out.print(table)
        for codec, ladders in row["ladders"].items():
            table = Table(title=f"{row['dataset']}, {codec}: peers 1 to {row['versions']} versions behind")
            for title in ("", "bytes, mean", "÷ chain", "furthest ÷ chain", "artifacts, mean", "kept ÷ chain"):
                table.add_column(title, justify="right" if title else "left")
            for rung in ladders:
                table.add_row(
                    rung["ladder"],
                    f"{rung['mean_bytes']:,}",
                    f"{rung['ratio_to_chain']:.2f}",
                    f"{rung['furthest_ratio']:.2f}",
                    f"{rung['mean_artifacts']:.1f}",
                    f"{rung['kept_to_chain']:.2f}",
                )
            out.print(table)
    out.print(
        "One core. Replay: each delta decoded, both digests verified, and applied. Catch up: the squash alone. "
        "Exact: a squash made on demand for each peer."
    )


def draw(document: dict[str, Any], file: Path) -> None:
    """Plot the bytes of squashes and of their deltas, and the ratio. Raises LocalError."""
    figure, ((sizes, ratios),) = blank(1, 2, width=11, height=4)
    for row, dash in zip(document["rows"], ["-", "--", ":", "-."] * len(document["rows"]), strict=False):
        for number, (codec, part) in enumerate(row["sizes"].items()):
            k = range(1, row["versions"] + 1)
            chain = [sum(part["chain_bytes"][:n]) for n in k]
            label = plain(f"{row['dataset']}, {codec}")
            colour = f"C{number}"
            sizes.plot(k, [b / 1e6 for b in chain], dash, color=colour, alpha=0.35)
            sizes.plot(k, [b / 1e6 for b in part["squash_bytes"]], dash, color=colour, label=label)
            ratios.plot(
                k,
                [s / max(1, c) for s, c in zip(part["squash_bytes"], chain, strict=True)],
                dash,
                color=colour,
                label=label,
            )
    sizes.set(
        xlabel="deltas, k", ylabel="MB", xscale="log", yscale="log", title="squash of k deltas (pale: the deltas)"
    )
    ratios.set(
        xlabel="deltas, k", ylabel="squash ÷ deltas", xscale="log", ylim=(0, 1.05), title="size relative to the deltas"
    )
    for axes in (sizes, ratios):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, file)
