"""``p2pcast bench device``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written

MEANINGS = {
    "copy": "the state's bytes, read and written",
    "compare": "two states compared; the changed entries copied to the host",
    "digest": "digest of the whole state",
    "ranks": "classes of all words, ranks of the changed words",
    "scatter": "a patch written and read back",
}


@click.command()
@click.option("--mib", type=click.IntRange(1), default=256, help="Size of the bf16 state in MiB.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Number of measured rounds, after one warm-up round.")
@click.option("--device", help="torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]")
@documented
def device(mib: int, rounds: int, device: str | None, as_json: bool, output: Path | None) -> None:
    """Measure the dense passes of coding and audit with torch operations, on the device that holds the weights."""
    from netem.bench.codec_comparison.device_speed import bench_device

    result = bench_device(mib << 20, rounds, device=device)
    if written(result, output, as_json=as_json):
        return
    share = 100 * result["changed"] / result["params"]
    table = Table(
        title=(
            f"{result['device']}: {result['state_bytes'] / 2**20:.0f} MiB of bf16, {share:.1f} % changed, "
            f"median of {rounds}"
        )
    )
    for title in ("pass", "what", "time", "GB of state a second", "speed ÷ copy"):
        table.add_column(title, justify="left" if title in ("pass", "what") else "right")
    for row in result["rows"]:
        speed = row["state_bytes_per_s"] / 1e9
        table.add_row(
            row["pass"],
            MEANINGS[row["pass"]],
            f"{1e3 * row['s']:.1f} ms",
            f"{speed:.2f}",
            f"{row['speed_to_copy']:.3f}",
        )
    console().print(table)
