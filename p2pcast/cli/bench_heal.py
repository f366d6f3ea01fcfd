"""``p2pcast bench heal``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast import event_loop
from p2pcast.cli.options import Rate, console, documented, handed_over
from p2pcast.limits import MIB


@click.command()
@click.option(
    "--versions", type=click.IntRange(2), default=20, show_default=True, help="Deltas behind the whole state that the hub keeps."
)
@click.option(
    "--state", "state_mib", type=click.IntRange(40), default=128, show_default=True, help="MiB of weights, in cells of 8."
)
@click.option("--rate", type=Rate(), default="100mbit", show_default=True, help="Of every link.")
@click.option("--deadline", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds for each.")
@documented
def heal(versions: int, state_mib: int, rate: float, deadline: float, as_json: bool, output: Path | None) -> None:
    """Cells of a peer's shadow that rot, and what lies on its disk with them: bytes and time until it is right again, beside one that has lost all.

    A hub and two peers as processes on this machine; no privileges.
    """
    from netem import healing

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        found = event_loop.run(healing.heal(Path(folder), state_mib * MIB, versions, rate / 8, deadline))
    document: dict[str, Any] = {
        "versions": versions, "rate_bits_s": rate, "state_bytes": found.state_bytes, "listed_bytes": found.listed_bytes,
        "rows": [
            {
                "harm": r.harm.what, "cell_bytes": r.cell_bytes, "pieces_bytes": r.pieces_bytes, "wire_bytes": r.wire_bytes,
                "to_cells": round(r.pieces_bytes / r.cell_bytes, 4), "seconds": round(r.seconds, 3),
            }
            for r in found.rows
        ],
    }  # fmt: skip
    if handed_over(document, output, as_json=as_json):
        return
    table = Table("what is spoilt", "bytes of the state", "piece bytes fetched", "÷", "all bytes on the wire", "s")
    for row in document["rows"]:
        wire = "–" if row["wire_bytes"] is None else f"{row['wire_bytes']:,}"
        table.add_row(
            row["harm"], f"{row['cell_bytes']:,}", f"{row['pieces_bytes']:,}", f"{row['to_cells']:.2f}", wire, f"{row['seconds']:.2f}"
        )  # fmt: skip
    console().print(table)
    click.echo(
        f"{found.state_bytes:,} bytes of state, a whole one at the hub and {versions} deltas and their squashes behind it, {rate / 1e6:g} Mbit/s. Seconds from joining "
        "(while it runs: from the next version's publishing) to the newest version staged"
    )
