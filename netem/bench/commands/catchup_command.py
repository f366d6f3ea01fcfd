"""``p2pcast bench catchup``."""

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
@click.option("--versions", type=click.IntRange(2), default=40, help="Number of versions that the peer is behind.")
@click.option("--state", "state_mib", type=click.IntRange(1), default=64, help="Size of the weights in MiB.")
@click.option("--rate", type=Rate(), default="20mbit", help="Rate of the peer's link in bits per second.")
@click.option("--codec", type=click.Choice(["flat", "context"]), default="context", help="Codec of the deltas.")
@click.option(
    "--deadline", type=click.FloatRange(1), default=120.0, help="Time limit in seconds for each way to catch up."
)
@documented
def catchup(
    versions: int, state_mib: int, rate: float, codec: str, deadline: float, as_json: bool, output: Path | None
) -> None:
    """Measure bytes and time until a peer that missed many versions is current. It catches up by every delta, by the
    squashes that the hub keeps, and by a squash made for this peer.

    For comparison: one squash of all versions, made offline, the smallest possible. A hub and peers run as processes on
    this machine; no privileges needed.
    """
    from netem.bench.catchup_cost import catch_up

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        found = event_loop.run(catch_up(Path(folder), state_mib * MIB, versions, rate / 8, codec, deadline))
    document: dict[str, Any] = {
        "versions": versions,
        "codec": codec,
        "rate_bits_s": rate,
        "state_bytes": found.state_bytes,
        "chain_bytes": found.chain_bytes,
        "exact_bytes": found.exact_bytes,
        "rows": [
            {
                "way": r.policy,
                "artifacts": r.artifacts,
                "bytes": r.bytes,
                "seconds": round(r.seconds, 3),
                "to_chain": round(r.bytes / found.chain_bytes, 4),
                "to_exact": round(r.bytes / found.exact_bytes, 4),
            }
            for r in found.rows
        ],
    }
    if written(document, output, as_json=as_json):
        return
    table = Table("way", "artifacts", "bytes", "÷ every delta", "÷ one exact squash", "s")
    for row in document["rows"]:
        table.add_row(
            row["way"],
            str(row["artifacts"]),
            f"{row['bytes']:,}",
            f"{row['to_chain']:.2f}",
            f"{row['to_exact']:.2f}",
            f"{row['seconds']:.2f}",
        )
    console().print(table)
    click.echo(
        f"{versions} versions behind, {found.state_bytes:,} bytes of state, {codec}, {rate / 1e6:g} Mbit/s; "
        f"every delta {found.chain_bytes:,} bytes, one exact squash {found.exact_bytes:,}. "
        "Seconds from joining to staged, which include making a squash"
    )
