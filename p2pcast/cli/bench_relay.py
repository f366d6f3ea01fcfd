"""``p2pcast bench relay``."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.option("--payload", type=click.IntRange(4), default=1024, show_default=True, help="MiB to send through the chain.")
@click.option("--stripes", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def relay(payload: int, stripes: int, runs: int, as_json: bool) -> None:
    """CPU per GB and memory of a peer that receives, verifies, stores and forwards; staging is off."""
    from p2pcast.bench.relay import bench_relay

    result = bench_relay(payload << 20, stripes, runs)
    if as_json:
        click.echo(json.dumps(result))
        return
    table = Table(
        "run",
        "link",
        "CPU s/GB",
        "GB/s",
        "peak anonymous memory",
        title=f"{payload} MiB over {stripes} stripes, middle of three processes",
    )
    for row in result["rows"]:
        memory = f"{row['peak_rss_bytes'] / 2**20:.0f} MiB"
        table.add_row(
            str(row["run"]), "TLS" if row["tls"] else "plaintext", f"{row['cpu_s_per_gb']:.2f}", f"{row['gb_s']:.2f}", memory
        )
    Console().print(table)
    plain, tls = result["cpu_s_per_gb_plaintext"], result["cpu_s_per_gb_tls"]
    click.echo(f"median CPU: plaintext {plain:.2f} s/GB, TLS {tls:.2f} s/GB; peak {result['peak_rss_bytes'] / 2**20:.0f} MiB")
