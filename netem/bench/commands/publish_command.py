"""``p2pcast bench publish``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written


@click.command()
@click.option("--mib", type=click.IntRange(1), default=512, help="Size of the bf16 state in MiB.")
@click.option(
    "--steps", type=click.IntRange(1), default=5, help="Number of measured versions, after two warm-up versions."
)
@click.option("--device", help="torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]")
@click.option(
    "--previous",
    type=click.Choice(["gpu", "pinned"]),
    default="gpu",
    help="Where the publisher keeps its two states of a model on a GPU: there, or in pinned memory of the host.",
)
@documented
def publish(
    mib: int, steps: int, device: str | None, previous: Literal["gpu", "pinned"], as_json: bool, output: Path | None
) -> None:
    """Measure the time that publishing live tensors adds to a training step, beside a memcpy of the state."""
    from netem.bench.publish_cost import bench_publish
    from trainer_node import Publisher

    side = 2048 if mib >= 8 else 512

    def make(hub: str, token: Path) -> Publisher:
        return Publisher(hub, token_file=token, previous=previous)

    result = bench_publish(make, mib << 20, steps, side=side, device=device)
    if written(result, output, as_json=as_json):
        return
    table = Table(title=(f"{result['device']}: {result['state_bytes'] / 2**20:.0f} MiB of bf16, median of {steps}"))
    for title in (
        "tensors",
        "changed",
        "delta",
        "memcpy",
        "publish() returns",
        "snapshot",
        "÷ memcpy",
        "stored at the hub",
        "÷ memcpy",
    ):
        table.add_column(title, justify="left" if title == "tensors" else "right")
    for row in result["rows"]:
        table.add_row(
            row["row"],
            f"{100 * row['changed'] / row['params']:.2f} %",
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{1e3 * row['memcpy_s']:.0f} ms",
            f"{1e3 * row['publish_s']:.0f} ms",
            f"{1e3 * row['snapshot_s']:.0f} ms",
            f"{row['snapshot_to_memcpy']:.2f}",
            f"{1e3 * row['total_s']:.0f} ms",
            f"{row['total_to_memcpy']:.2f}",
        )
    out = console()
    out.print(table)
    out.print(
        "Snapshot: from the call of publish() until the optimiser may continue. "
        "Stored: until wait_durable() returns, with hub and publisher on the same cores."
    )
