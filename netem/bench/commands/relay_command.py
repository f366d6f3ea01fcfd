"""``p2pcast bench relay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, written
from p2pcast.ground.errors import UsageError


@click.command()
@click.option("--payload", type=click.IntRange(4), default=256, help="Size in MiB of the data sent through the chain.")
@click.option("--rate", type=Rate(), default="1gbit", help="Rate of the source in bits per second.")
@click.option("--stripes", type=click.IntRange(1, 64), default=4, help="Number of TCP connections of a link.")
@click.option("--runs", type=click.IntRange(1), default=3, help="Number of measured runs.")
@click.option("--wide", is_flag=True, help="Throughput of the peer by its number of cores instead; without --rate.")
@documented
def relay(payload: int, rate: float, stripes: int, runs: int, wide: bool, as_json: bool, output: Path | None) -> None:
    """Measure CPU time per GB and memory of a peer that receives, verifies, stores and forwards; staging is off."""
    from netem.bench.relay_cost import bench_relay, bench_wide

    if wide:
        if click.get_current_context().get_parameter_source("rate") is not ParameterSource.DEFAULT:
            raise UsageError("--wide measures without a limit of the source: leave --rate out")
        result = bench_wide(payload << 20, stripes, runs)
        if not written(result, output, as_json=as_json):
            _print_wide(result)
        return
    result = bench_relay(payload << 20, rate, stripes, runs)
    if written(result, output, as_json=as_json):
        return
    table = Table(
        "run",
        "link",
        "CPU s/GB",
        "of it kernel",
        "GB/s",
        "peak anonymous memory",
        title=f"{payload} MiB over {stripes} stripes, middle of three processes",
    )
    for row in result["rows"]:
        table.add_row(
            str(row["run"]),
            row["link"],
            f"{row['cpu_s_per_gb']:.2f}",
            f"{row['kernel_s_per_gb']:.2f}",
            f"{row['gb_s']:.2f}",
            f"{row['peak_rss_bytes'] / 2**20:.0f} MiB",
        )
    console().print(table)
    click.echo(
        f"median CPU, s/GB: plaintext {result['cpu_s_per_gb_plaintext']:.2f} "
        f"({result['plaintext_to_bare']:.2f} x the {result['cpu_s_per_gb_bare']:.2f} of a bare relay: "
        f"read, hash, send, write), TLS {result['cpu_s_per_gb_tls']:.2f} "
        f"({result['tls_to_bare']:.2f} x the bare relay's {result['cpu_s_per_gb_bare_tls']:.2f}); "
        f"peak {result['peak_rss_bytes'] / 2**20:.0f} MiB"
    )


def _print_wide(result: dict[str, Any]) -> None:
    table = Table(
        "cores",
        "GB/s",
        "CPU s/GB",
        "of it the event loop's thread",
        "most that the loop can carry, GB/s",
        title=f"{result['payload_bytes'] >> 20} MiB over {result['stripes']} stripes behind TLS",
    )
    for row in result["rows"]:
        table.add_row(
            str(row["cores"]),
            f"{row['gb_s']:.3f}",
            f"{row['cpu_s_per_gb']:.2f}",
            f"{row['loop_s_per_gb']:.2f}",
            f"{row['loop_gb_s']:.2f}",
        )
    console().print(table)
