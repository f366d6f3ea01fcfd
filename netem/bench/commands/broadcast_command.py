"""``p2pcast bench broadcast``."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, Rate, console, documented, written

RIVALS = ("chain", "libtorrent", "shardcast", "star", "rsync", "zstd")
CROWDED = 0.95
"""Share of the machine's cores in use above which the machine limits the times, and not the links."""


@click.command()
@click.option(
    "--peers", type=click.IntRange(1, 500), multiple=True, default=(8, 16), help="Number of peers; repeatable."
)
@click.option("--payload", type=click.FloatRange(0.5), default=24.0, help="Size of a version's delta in MiB.")
@click.option(
    "--state",
    type=click.FloatRange(1),
    default=32.0,
    help="Size in MiB of the whole state for rsync, zstd and one row of p2pcast; 1 % of the state changes.",
)
@click.option("--uplink", type=Rate(), default="300mbit", help="Rate of the hub's link in bits per second, each way.")
@click.option(
    "--peer-rate", type=Rate(), default="100mbit", help="Rate of every peer's link in bits per second, each way."
)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Number of measured broadcasts per system.")
@click.option(
    "--rival",
    "rivals",
    type=click.Choice(RIVALS),
    multiple=True,
    default=RIVALS,
    help="System to compare with, in the same run; repeatable.",
)
@click.option("--no-rivals", is_flag=True, help="p2pcast alone, without other systems.")
@click.option(
    "--late",
    type=click.IntRange(0, 100),
    default=0,
    help=(
        "Number of peers that join and catch up during every second broadcast of p2pcast; adds a row with these and "
        "one without."
    ),
)
@click.option("--plaintext", is_flag=True, help="A row of p2pcast without TLS, in addition.")
@click.option(
    "--congestion", metavar="NAME", help="TCP congestion control at every host.  [default: the machine's own]"
)
@click.option(
    "--dir",
    "folder",
    type=PATH,
    help="Parent of the work folder, which is removed at the end.  [default: the temporary folder]",
)
@documented
def broadcast(
    peers: tuple[int, ...],
    payload: float,
    state: float,
    uplink: float,
    peer_rate: float,
    rounds: int,
    rivals: tuple[str, ...],
    no_rivals: bool,
    late: int,
    plaintext: bool,
    congestion: str | None,
    folder: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the time to the last peer, divided by the payload at a peer's own rate, over rate-shaped links between
    network namespaces. Needs root.

    Every host is a namespace with processes of its own: `p2pcast seed`, and `p2pcast join` with a folder to install
    into. Rivals get the same bytes: bare chains of forwarding sockets, libtorrent, shardcast, and a star over HTTP. The
    rivals rsync and zstd get the whole state.
    """
    from netem.broadcast.broadcast_comparison import Bench, bench_broadcast

    table = Table(
        "system",
        "peers",
        "time to last, s",
        "÷ ideal",
        "of each round",
        "staged, s",
        "moved, MB",
        "CPU s, all · busiest",
        "machine",
    )

    def show_row(row: dict[str, Any]) -> None:
        if "skipped" in row:
            click.echo(f"{row['system']}, {row['peers']} peers: left out, {row['skipped']}", err=True)
            return
        table.add_row(
            row["system"],
            str(row["peers"]),
            f"{row['all_s']:.3f}",
            f"{row['all_over_ideal']:.3f}",
            " ".join(f"{ratio:.2f}" for ratio in row["every_over_ideal"]),
            "" if row["staged_s"] is None else f"{row['staged_s']:.3f}",
            f"{moved / 1e6:.2f}" if (moved := row["settings"].get("moved_bytes")) else "",
            f"{row['cpu_s']:.1f} · {row['busiest_cpu_s']:.2f}",
            f"{row['machine_busy']:.0%}",
        )

    chosen = () if no_rivals else tuple(dict.fromkeys(rivals))
    bench = Bench(
        tuple(dict.fromkeys(peers)),
        round(payload * (1 << 20)),
        uplink,
        peer_rate,
        rounds,
        chosen,
        congestion,
        folder,
        late,
        plaintext,
        round(state * (1 << 20)),
    )
    result = bench_broadcast(bench, show_row)
    if written(result, output, as_json=as_json):
        return
    console().print(table)
    ideal_s = next(row["ideal_s"] for row in result["rows"] if "ideal_s" in row)
    click.echo(
        f"ideal: {payload:g} MiB at {peer_rate / 1e6:g} Mbit/s, {ideal_s:.3f} s; "
        f"congestion control: {result['congestion']}"
    )
    if late:
        _tell_late(result["rows"])
    if any(row.get("machine_busy", 0.0) > CROWDED for row in result["rows"]):
        click.echo(
            "the machine's cores were nearly all in use: the processor, and not only the links, limits these times"
        )


def _tell_late(rows: list[dict[str, Any]]) -> None:
    """Print how much later a broadcast ends while other peers catch up."""
    for alone, beside in pairwise(rows):
        if "late" in beside.get("settings", {}):
            still = beside["settings"]["still_fetching"]
            click.echo(
                f"{alone['peers']} peers: {beside['all_s'] / alone['all_s'] - 1:+.1%} to the last peer while "
                f"{beside['settings']['late']} other peers catch up "
                f"({sum(still) / len(still):.0%} of these still catching up when the last peer had all)"
            )
