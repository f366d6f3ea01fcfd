"""``p2pcast bench siege``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast import event_loop
from p2pcast.cli.options import Rate, console, documented, handed_over
from p2pcast.errors import EXIT_FAILED
from p2pcast.limits import MIB

CHAINS = 2
DEADLINE_S = 60.0


@click.command()
@click.option("--connections", type=click.IntRange(1), default=10_000, show_default=True, help="That mean no good.")
@click.option("--frames", type=click.IntRange(1), default=1_000_000, show_default=True, help="That they send in all, about.")
@click.option("--at-once", type=click.IntRange(1), default=400, show_default=True, help="Connections that are open at one time.")
@click.option("--peers", type=click.IntRange(2), default=5, show_default=True)
@click.option("--payload", type=click.IntRange(1), default=4, show_default=True, help="MiB of each version.")
@click.option("--rate", type=Rate(), default="16mbit", show_default=True, help="Of every way between two honest processes.")
@click.option("--plaintext", is_flag=True, help="Links without TLS, so that every byte reaches p2pcast's own code.")
@click.option("--seed", type=int, default=0, show_default=True)
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
    """Versions go out to honest peers while strangers, and somebody who has stolen a token or a certificate, do what they can against hub and peers.

    A hub and peers as processes on this machine. Exit code 1 if a version is wrong anywhere or comes twice,
    or if a daemon meets an error that nobody had thought of.
    """
    document = event_loop.run(_measure(peers, payload * MIB, rate / 8, connections, frames, at_once, seed, plaintext=plaintext))
    if not handed_over(document, output, as_json=as_json):
        _show(document)
    if document["wrong"] or document["bytes_duplicate"] or document["tracebacks"]:
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
    from netem.besieged import besiege
    from netem.fleet import Fleet
    from netem.loopback import Net

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        net = Net(rate_bytes_s)
        async with Fleet(Path(folder), net, peers, CHAINS, payload_bytes, DEADLINE_S, plaintext=plaintext) as fleet:
            return (await besiege(fleet, connections, frames, at_once, seed)).document | {"tls": not plaintext}


def _show(document: dict[str, Any]) -> None:
    from netem.siege.kinds import kinds

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
        f"{document['connections']} connections and {document['frames']} frames in {document['lasted_s']} s; versions took {document['siege_s']:.2f} s (worst {document['siege_worst_s']:.2f}) "
        f"against {document['calm_s']:.2f} s in peace; {document['tally'].get('held for good', 0)} connections were borne for good, {document['tally'].get('given up', 0)} never answered; "
        f"{document['log_bytes']} bytes of log, {document['tracebacks']} tracebacks in it; {document['bytes_duplicate']} bytes twice; {len(document['wrong'])} with other bits"
    )
