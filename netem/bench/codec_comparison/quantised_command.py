"""``p2pcast bench quantised``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written


@click.command("quantised")
@click.option("--versions", type=click.IntRange(1), default=3, help="Number of deltas for each form.")
@click.option(
    "--lr",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    help="Learning rate of the built-in training; repeatable.  [default: 1e-6, 3e-6]",
)
@click.option(
    "--engines",
    is_flag=True,
    help="Start a vLLM of each kind that runs here, and measure the divergence of its samples from the learner.",
)
@documented
def quantised(versions: int, rates: tuple[float, ...], engines: bool, as_json: bool, output: Path | None) -> None:
    """Measure the bytes of a version in each quantised form beside bf16, and with --engines the KL divergence between
    sampler and learner.

    The data are pretrained weights under real AdamW steps.
    """
    from netem.bench.codec_comparison import quantised_sizes as sizes

    document: dict[str, Any] = {"sizes": [sizes.measured(rate, versions) for rate in rates or sizes.RATES]}
    if engines:
        from netem.bench.engine_divergence import measured

        document["engines"] = measured()
    if not written(document, output, as_json=as_json):
        _print(document)


def _print(document: dict[str, Any]) -> None:
    out = console()
    for run in document["sizes"]:
        table = Table(title=f"learning rate {run['learning_rate']:g}, {run['params']:,} values, mean of a version")
        for title in ("form", "whole state", "delta", "÷ bf16", "changed values", "smaller than whole"):
            table.add_column(title, justify="left" if title == "form" else "right")
        plain = run["rows"][0]["bytes"]
        for row in run["rows"]:
            table.add_row(
                row["form"],
                f"{row['dense_bytes']:,}",
                f"{row['bytes']:,}",
                f"{row['bytes'] / plain:.2f}",
                f"{row['changed']:,}",
                f"{row['dense_bytes'] / row['bytes']:.0f} ×",
            )
        out.print(table)
    if "engines" in document:
        table = Table(title="KL(sampler || learner) per token, in nats; learner: transformers, bf16 weights in fp32")
        for title in ("engine", "tokens", "KL", "k3", "remark"):
            table.add_column(title, justify="left" if title in ("engine", "remark") else "right")
        for row in document["engines"]:
            figures = ["–"] * 3 if row["error"] else [f"{row['tokens']:,}", f"{row['kl']:.2e}", f"{row['k3']:.2e}"]
            table.add_row(row["engine"], *figures, row["error"] or "")
        out.print(table)
