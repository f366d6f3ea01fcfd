"""``p2pcast bench start`` and ``p2pcast bench page``."""

from __future__ import annotations

import shutil
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


@click.command()
@click.option("--peers", type=click.IntRange(1, 10_000), default=1000, help="Number of peers that the hub knows.")
@click.option("--viewers", type=click.IntRange(1, 64), default=20, help="Number of open pages.")
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, help="Length of each measurement, in seconds.")
@documented
def page(peers: int, viewers: int, seconds: float, as_json: bool, output: Path | None) -> None:
    """Measure the cost of the run's page: CPU of the hub, bytes of a load, time to the first paint in Chromium."""
    from netem.bench.page_cost import bench_page

    result = bench_page(peers, viewers, seconds, shutil.which("chromium"))
    if written(result, output, as_json=as_json):
        return
    table = Table("figure", "value", title=f"{peers} peers, {viewers} viewers")
    table.add_row("CPU of the hub without viewers", f"{100 * result['idle_share']:.1f} % of a core")
    table.add_row("CPU of the hub with viewers", f"{100 * result['viewed_share']:.1f} % of a core")
    table.add_row("a picture, compressed", f"{result['picture_bytes'] / 1e3:.1f} kB")
    for name, value in (result["chromium"] or {}).items():
        table.add_row(name.replace("_", " "), f"{value / 1e3:.1f} kB" if name.endswith("bytes") else f"{value:.3f} s")
    if result["chromium"] is None:
        table.add_row("Chromium", "not installed: no load was measured")
    console().print(table)
