"""``p2pcast bench broadcast``."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, Rate, console, documented, handed_over

RIVALS = ("chain", "libtorrent", "shardcast", "star", "rsync", "zstd")
CROWDED = 0.95
"""Share of the machine's cores in use, above which times are the machine's rather than the links'."""


@click.command()
@click.option(
    "--peers",
    type=click.IntRange(1, 500),
    multiple=True,
    default=(8, 16),
    show_default=True,
    help="Hosts beside the hub; repeatable.",
)
@click.option("--payload", type=click.FloatRange(0.5), default=24.0, show_default=True, help="MiB of a version's delta.")
@click.option(
    "--state",
    type=click.FloatRange(1),
    default=32.0,
    show_default=True,
    help="MiB of the state that rsync and zstd are given, 1 % of it changed; p2pcast has a row on it too.",
)
@click.option("--uplink", type=Rate(), default="300mbit", show_default=True, help="Of the hub's link, each way.")
@click.option("--peer-rate", type=Rate(), default="100mbit", show_default=True, help="Of every peer's link, each way.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Broadcasts of each system that count.")
@click.option(
    "--rival",
    "rivals",
    type=click.Choice(RIVALS),
    multiple=True,
    default=RIVALS,
    show_default=True,
    help="In the same run; repeatable.",
)
@click.option("--no-rivals", is_flag=True, help="p2pcast alone.")
@click.option(
    "--late",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Peers that join and catch up from nothing beside every other of p2pcast's broadcasts: a row without, and one with them.",
)
@click.option("--plaintext", is_flag=True, help="p2pcast without TLS too: a row of its own.")
@click.option("--congestion", metavar="NAME", help="TCP congestion control at every host, instead of the machine's own.")
@click.option(
    "--dir", "folder", type=PATH, help="Where a work folder is made, and removed again; temporary files' place by default."
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
    """Time to the last peer ÷ the payload at a peer's own rate, over rate-shaped links between network namespaces.

    Every host is a namespace with processes of its own: `p2pcast seed`, and `p2pcast join` with a folder to install into. Beside it bare chains of forwarding
    sockets, libtorrent and shardcast set up for this, and a star over HTTP, given the same bytes; and rsync and zstd of the whole file, given a state. Needs root.
    """
    from netem.broadcast.run import Bench, bench_broadcast

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

    def tell(row: dict[str, Any]) -> None:
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
    result = bench_broadcast(bench, tell)
    if handed_over(result, output, as_json=as_json):
        return
    console().print(table)
    ideal_s = next(row["ideal_s"] for row in result["rows"] if "ideal_s" in row)
    click.echo(
        f"ideal: {payload:g} MiB at {peer_rate / 1e6:g} Mbit/s, {ideal_s:.3f} s; congestion control: {result['congestion']}"
    )
    if late:
        _tell_late(result["rows"])
    if any(row.get("machine_busy", 0.0) > CROWDED for row in result["rows"]):
        click.echo("the machine's cores were all but full: these times are in part its own, not the links'")


def _tell_late(rows: list[dict[str, Any]]) -> None:
    """What others that catch up cost a broadcast."""
    for alone, beside in pairwise(rows):
        if "late" in beside.get("settings", {}):
            still = beside["settings"]["still_fetching"]
            click.echo(
                f"{alone['peers']} peers: {beside['all_s'] / alone['all_s'] - 1:+.1%} to the last one while {beside['settings']['late']} others catch up "
                f"({sum(still) / len(still):.0%} of them still at it when it had all)"
            )
