"""``p2pcast bench live``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, console, documented, handed_over
from p2pcast.errors import EXIT_FAILED


@click.command()
@click.option("--versions", type=click.IntRange(2), default=50, show_default=True, help="How many are trained and published.")
@click.option("--clients", type=click.IntRange(1), default=8, show_default=True, help="That stream answers without a pause.")
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True, help="Tensor parallelism of the vLLM server.")
@click.option(
    "--kv",
    type=click.Choice(["recompute", "salt", "keep"]),
    default="recompute",
    show_default=True,
    help="What becomes of keys and values of older weights, with p2pcast and with vLLM's own reload.",
)
@click.option("--hidden", type=click.IntRange(128), default=256, show_default=True, help="Of the model; a multiple of 128.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--fresh-every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Compare with fresh engines at the first, every n-th and the last version.",
)
@click.option(
    "--dir", "folder", type=PATH, default="bench-out/live", show_default=True, help="Work folder; an earlier one is replaced."
)
@click.option(
    "--keep", is_flag=True, help="Keep checkpoints and state too; without it only logs and the result stay after a PASS."
)
@documented
def live(
    versions: int,
    clients: int,
    tp: int,
    kv: str,
    hidden: int,
    layers: int,
    fresh_every: int,
    folder: Path,
    keep: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Many versions into a live vLLM under load: pause and gaps between tokens, beside vLLM's own dense reload in the same run.

    Exit code 1 when a request failed, or weights or answers were not the version's.
    """
    from p2pcast.bench.live import Options, bench_live

    options = Options(folder, versions, clients, tp, kv, hidden, layers, fresh_every, keep)
    document = bench_live(options)
    if not handed_over(document, output, as_json=as_json):
        _print(document)
    if document["verdict"] != "PASS":
        sys.exit(EXIT_FAILED)


COLUMNS = {
    "pause_median_s": "pause, median",
    "pause_p99_s": "p99",
    "commands_median_s": "commands, median",
    "gap_p50_s": "gap at a switch, p50",
    "gap_p99_s": "p99",
    "gap_worst_median_s": "worst of a switch, median",
    "gap_elsewhere_p50_s": "gap elsewhere, p50",
    "gap_elsewhere_p99_s": "p99",
}
RATIOS = {
    "pause_median_s": "pause_ratio",
    "commands_median_s": "commands_ratio",
    "gap_p99_s": "gap_p99_ratio",
    "gap_worst_median_s": "gap_worst_ratio",
}


def _print(document: dict[str, Any]) -> None:
    out = console()
    size = f"{document['params']:,} parameters, tensor parallel {document['tensor_parallel']}"
    table = Table("", *COLUMNS.values(), title=f"{size}, {document['clients']} clients, --kv {document['kv']}")
    for row in document["rows"]:
        table.add_row(row["system"], *(_ms(row[key]) for key in COLUMNS))
    table.add_row("ratio", *(_times(document[RATIOS[key]]) if key in RATIOS else "" for key in COLUMNS))
    out.print(table)
    for row in document["rows"]:
        parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in row["parts_median_s"].items())
        rate = row["tokens"] / row["elapsed_s"]
        out.print(f"{row['system']}: {row['switches']} switches, {rate:.0f} tokens/s; medians of a switch: {parts}")
    ours = document["rows"][0]
    if ours["recomputed_tokens"] is not None:
        each = ours["recomputed_tokens_median"]
        out.print(f"computed anew with the new weights: {ours['recomputed_tokens']:,} tokens in all, {each:.0f} a switch")
    checks = Table("", "check", "", title=document["verdict"])
    for check in document["checks"]:
        checks.add_row("pass" if check["ok"] else "FAIL", check["name"], check["detail"])
    out.print(checks)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ×"
