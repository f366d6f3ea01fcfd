"""``p2pcast bench relay``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, handed_over


@click.command()
@click.option("--payload", type=click.IntRange(4), default=256, show_default=True, help="MiB to send through the chain.")
@click.option("--rate", type=Rate(), default="1gbit", show_default=True, help="At which the source produces.")
@click.option("--stripes", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@documented
def relay(payload: int, rate: float, stripes: int, runs: int, as_json: bool, output: Path | None) -> None:
    """CPU per GB and memory of a peer that receives, verifies, stores and forwards; staging is off."""
    from p2pcast.bench.relay import bench_relay

    result = bench_relay(payload << 20, rate, stripes, runs)
    if handed_over(result, output, as_json=as_json):
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
        f"median CPU, s/GB: plaintext {result['cpu_s_per_gb_plaintext']:.2f} ({result['plaintext_to_bare']:.2f} x the {result['cpu_s_per_gb_bare']:.2f} of a bare relay: "
        f"read, hash, send, write), TLS {result['cpu_s_per_gb_tls']:.2f} ({result['tls_to_bare']:.2f} x its {result['cpu_s_per_gb_bare_tls']:.2f}); "
        f"peak {result['peak_rss_bytes'] / 2**20:.0f} MiB"
    )
