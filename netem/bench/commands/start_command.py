"""``p2pcast bench start``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written


@click.command()
@click.option("--runs", type=click.IntRange(1), default=5, help="Number of fresh starts, and of restarts.")
@click.option("--versions", type=click.IntRange(1, 1000), default=1000, help="Number of versions stored before a kill.")
@documented
def start(runs: int, versions: int, as_json: bool, output: Path | None) -> None:
    """Measure how soon a hub answers after its start and after kill -9, and how soon it ends after SIGTERM."""
    from netem.bench.start_cost import bench_start

    result = bench_start(runs, versions)
    if written(result, output, as_json=as_json):
        return
    table = Table("from", "to", "median, s", "longest, s", title=f"{runs} runs")
    for begin, end, name in (
        ("start", "the first answer", "listening_s"),
        ("SIGTERM", "end of the process", "ended_s"),
        (f"restart after kill -9 with {versions} versions", "status of the newest version", "back_s"),
    ):
        table.add_row(begin, end, f"{result['medians'][name]:.2f}", f"{max(result[name]):.2f}")
    console().print(table)
