"""``python -m tests.chaos.siege``: attacks on running daemons by strangers, and by attackers with a stolen token or
certificate.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from p2pcast.cli import exit_code
from p2pcast.cli.options import RateParameter, console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop
from tests.chaos.siege.attack_table import kinds
from tests.chaos.siege.siege_run import run_siege

CHAINS = 2
DEADLINE_S = 60.0


@click.command()
@click.option("--connections", type=click.IntRange(1), default=10_000, help="Number of attackers' connections.")
@click.option(
    "--frames",
    type=click.IntRange(1),
    default=1_000_000,
    help="Approximate number of frames that the attackers send in all.",
)
@click.option(
    "--at-once", type=click.IntRange(1), default=400, help="Number of attackers' connections open at the same time."
)
@click.option("--peers", type=click.IntRange(2), default=5, help="Number of honest peers.")
@click.option("--payload", type=click.IntRange(1), default=4, help="Size of a version in MiB.")
@click.option(
    "--rate",
    type=RateParameter(),
    default="16mbit",
    help="Rate of the path between two honest processes, in bits per second.",
)
@click.option("--plaintext", is_flag=True, help="Links without TLS, so that every byte reaches p2pcast's own code.")
@click.option("--seed", type=int, default=0, help="Seed of the random numbers.")
@documented
def siege(
    connections: int,
    frames: int,
    at_once: int,
    peers: int,
    payload: int,
    rate: float,
    plaintext: bool,
    seed: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Publish versions to honest peers while strangers, and attackers with a stolen token or certificate, attack the
    hub and the peers.

    A hub and peers run as processes on this machine. Exit code 1: a peer has wrong bits or duplicate bytes, or a daemon
    logged an unexpected error.
    """
    document = event_loop.run(
        _measure(peers, payload * MIB, rate / 8, connections, frames, at_once, seed, plaintext=plaintext)
    )
    if not written(document, output, as_json=as_json):
        _show(document)
    if document["wrong"] or document["bytes_duplicate"] or document["unexpected"]:
        sys.exit(EXIT_FAILED)


async def _measure(
    peers: int,
    payload_bytes: int,
    rate_bytes_s: float,
    connections: int,
    frames: int,
    at_once: int,
    seed: int,
    *,
    plaintext: bool,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        net = Net(rate_bytes_s)
        async with LocalFleet(
            Path(folder), net, peers, CHAINS, payload_bytes, DEADLINE_S, plaintext=plaintext
        ) as fleet:
            return (await run_siege(fleet, connections, frames, at_once, seed)).document | {"tls": not plaintext}


def _show(document: dict[str, Any]) -> None:
    table = Table("kind", "connections", "what it does")
    for kind, (_, what) in kinds(tls=document["tls"]).items():
        table.add_row(kind, str(document["tally"].get(kind, 0)), what.__doc__)
    console().print(table)
    held = Table("process", "anonymous MiB before · most · after", "descriptors", "tasks", "CPU s")
    for name, found in document["held"].items():
        shown = {what: [found[what][when] for when in ("before", "most", "after")] for what in found}
        shown["anonymous_bytes"] = [value >> 20 for value in shown["anonymous_bytes"]]
        held.add_row(name, *(" · ".join(map(str, shown[what])) for what in shown), str(document["cpu_s"][name]))
    console().print(held)
    click.echo(
        f"{document['connections']} connections and {document['frames']} frames in {document['lasted_s']} s; "
        f"versions took {document['siege_s']:.2f} s (worst {document['siege_worst_s']:.2f}) "
        f"under attack, {document['calm_s']:.2f} s without; "
        f"{document['tally'].get('held for good', 0)} connections were never closed by a daemon, "
        f"{document['tally'].get('given up', 0)} never answered; "
        f"{document['log_bytes']} bytes of log with {len(document['unexpected'])} unexpected errors; "
        f"{document['bytes_duplicate']} duplicate bytes; {len(document['wrong'])} with wrong bits"
    )


if __name__ == "__main__":
    sys.exit(exit_code(lambda: siege(standalone_mode=False)))
