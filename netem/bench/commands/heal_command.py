"""``p2pcast bench heal``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, written
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop


@click.command()
@click.option("--versions", type=click.IntRange(2), default=20, help="Number of deltas after the hub's anchor.")
@click.option(
    "--state",
    "state_mib",
    type=click.IntRange(40),
    default=128,
    help="Size of the weights in MiB, in cells of 8 MiB.",
)
@click.option("--rate", type=Rate(), default="100mbit", help="Rate of every link in bits per second.")
@click.option("--deadline", type=click.FloatRange(1), default=120.0, help="Time limit for a repair in seconds.")
@documented
def heal(versions: int, state_mib: int, rate: float, deadline: float, as_json: bool, output: Path | None) -> None:
    """Measure bytes and time for the repair of damaged cells of a peer's shadow.

    The peer's disk has the artifacts, or has lost them. A peer that has lost its whole state is measured beside it.

    A hub and two peers run as processes on this machine; no privileges needed.
    """
    from netem.bench import repair_cost

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        found = event_loop.run(repair_cost.repair(Path(folder), state_mib * MIB, versions, rate / 8, deadline))
    document: dict[str, Any] = {
        "versions": versions,
        "rate_bits_s": rate,
        "state_bytes": found.state_bytes,
        "listed_bytes": found.listed_bytes,
        "rows": [
            {
                "harm": r.damage.what,
                "cell_bytes": r.cell_bytes,
                "pieces_bytes": r.pieces_bytes,
                "wire_bytes": r.wire_bytes,
                "to_cells": round(r.pieces_bytes / r.cell_bytes, 4),
                "seconds": round(r.seconds, 3),
            }
            for r in found.rows
        ],
    }
    if written(document, output, as_json=as_json):
        return
    table = Table("damage", "bytes of the state", "piece bytes fetched", "÷", "all bytes on the wire", "s")
    for row in document["rows"]:
        wire = "–" if row["wire_bytes"] is None else f"{row['wire_bytes']:,}"
        table.add_row(
            row["harm"],
            f"{row['cell_bytes']:,}",
            f"{row['pieces_bytes']:,}",
            f"{row['to_cells']:.2f}",
            wire,
            f"{row['seconds']:.2f}",
        )
    console().print(table)
    click.echo(
        f"{found.state_bytes:,} bytes of state; an anchor at the hub, then {versions} deltas and their squashes; "
        f"{rate / 1e6:g} Mbit/s. Seconds from joining (for a running peer: from publishing the next version) "
        "to the newest version staged"
    )
