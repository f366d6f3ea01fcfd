"""``p2pcast bench catchup``."""

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
@click.option("--versions", type=click.IntRange(2), default=40, show_default=True, help="So many the peer is behind.")
@click.option("--state", "state_mib", type=click.IntRange(1), default=64, show_default=True, help="MiB of weights.")
@click.option("--rate", type=Rate(), default="20mbit", show_default=True, help="Of the peer's link.")
@click.option("--codec", type=click.Choice(["flat", "context"]), default="context", show_default=True, help="Of the deltas.")
@click.option("--deadline", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds for each way.")
@documented
def catchup(versions: int, state_mib: int, rate: float, codec: str, deadline: float, as_json: bool, output: Path | None) -> None:
    """A peer that was away for many versions: bytes and time until it is current, by every delta, by the squashes that the hub keeps, and by one made for it.

    Beside them: one squash of all of it, made offline (the least there is). A hub and peers as processes on this machine; no privileges.
    """
    from netem.catchup import come_back

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        found = event_loop.run(come_back(Path(folder), state_mib * MIB, versions, rate / 8, codec, deadline))
    document: dict[str, Any] = {
        "versions": versions, "codec": codec, "rate_bits_s": rate, "state_bytes": found.state_bytes, "chain_bytes": found.chain_bytes,
        "exact_bytes": found.exact_bytes,
        "rows": [
            {
                "way": r.way, "artifacts": r.artifacts, "bytes": r.bytes, "seconds": round(r.seconds, 3),
                "to_chain": round(r.bytes / found.chain_bytes, 4), "to_exact": round(r.bytes / found.exact_bytes, 4),
            }
            for r in found.rows
        ],
    }  # fmt: skip
    if handed_over(document, output, as_json=as_json):
        return
    table = Table("way", "artifacts", "bytes", "÷ every delta", "÷ one exact squash", "s")
    for row in document["rows"]:
        table.add_row(
            row["way"], str(row["artifacts"]), f"{row['bytes']:,}", f"{row['to_chain']:.2f}", f"{row['to_exact']:.2f}", f"{row['seconds']:.2f}"
        )  # fmt: skip
    console().print(table)
    click.echo(
        f"{versions} versions behind, {found.state_bytes:,} bytes of state, {codec}, {rate / 1e6:g} Mbit/s; every delta {found.chain_bytes:,} bytes, "
        f"one exact squash {found.exact_bytes:,}. Seconds from joining to staged: making a squash is in them"
    )
