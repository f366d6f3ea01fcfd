"""``p2pcast bench soak``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from p2pcast import event_loop
from p2pcast.cli.options import PATH, Rate, console, documented, handed_over
from p2pcast.errors import EXIT_FAILED
from p2pcast.limits import MIB
from p2pcast.store.files import explained

if TYPE_CHECKING:
    from netem.fleet import Fleet

CHAIN = 8
"""Peers in each chain, about."""
OUT_SHARE = 6
"""One in so many may be out of order at once."""


@click.command()
@click.option("--peers", type=click.IntRange(2), default=48, show_default=True)
@click.option("--versions", type=click.IntRange(1), default=20, show_default=True, help="In the storm; three before it are calm.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the storm: who is struck, by what, and when they come back."
)
@click.option("--payload", type=click.IntRange(1), default=2, show_default=True, help="MiB of each version.")
@click.option("--rate", type=Rate(), default="16mbit", show_default=True, help="Of every way between two processes.")
@click.option(
    "--every", type=click.FloatRange(0), default=5.0, show_default=True, help="Seconds from one version to the next, at least."
)
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=90.0,
    show_default=True,
    help="Seconds after which a version that has not arrived has failed.",
)
@click.option(
    "--hub", "with_hub", is_flag=True, help="The hub is struck, too; versions that came out meanwhile are left out of the times."
)
@click.option(
    "--fork", is_flag=True, help="Processes are forked from one that has loaded everything: hundreds fit into a machine."
)
@click.option("--logs", type=PATH, help="A folder for what the processes log; by default it is thrown away.")
@documented
def soak(
    peers: int,
    versions: int,
    seed: int,
    payload: int,
    rate: float,
    every: float,
    deadline: float,
    with_hub: bool,
    fork: bool,
    logs: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Many versions, while every second a peer is killed, leaves, is frozen, slows down or comes back.

    A hub and peers as processes on this machine, behind proxies that hold them to a rate; no privileges. Every version is compared bit for bit at every
    peer that nothing was done to, the last one at all; memory, descriptors and tasks are read all the time. Exit code 1 if anything is wrong or grows.
    """
    document = event_loop.run(_measure(peers, versions, seed, payload * MIB, rate / 8, every, deadline, with_hub, fork, logs))
    if not handed_over(document, output, as_json=as_json):
        _show(document)
    if not document["ok"]:
        sys.exit(EXIT_FAILED)


async def _measure(
    peers: int,
    versions: int,
    seed: int,
    payload_bytes: int,
    rate_bytes_s: float,
    every_s: float,
    deadline_s: float,
    with_hub: bool,
    fork: bool,
    logs: Path | None,
) -> dict[str, Any]:
    from netem.fleet import HUB, Fleet
    from netem.loopback import Net
    from netem.soak import Soak
    from netem.soaked import document
    from netem.storm import Storm

    program = None if fork else "p2pcast.cli"
    chains = max(1, peers // CHAIN)
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with Fleet(Path(folder), Net(rate_bytes_s), peers, chains, payload_bytes, deadline_s, program) as fleet:
            struck = [HUB, *fleet.names] if with_hub else fleet.names
            storm = Storm(struck, seed, max(1, peers // OUT_SHARE), lasting=(HUB,))
            run = Soak(fleet, versions, storm, every_s, deadline_s)
            try:
                await run.run()
            finally:
                if logs is not None:
                    _keep(fleet, logs)
            asked = {"peers": peers, "versions": versions, "seed": seed, "chains": chains}
            return asked | {"payload_bytes": payload_bytes, "rate_bits_s": rate_bytes_s * 8} | document(run)


def _keep(fleet: Fleet, folder: Path) -> None:
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for log in fleet.folder.glob("*.log"):
            shutil.copy(log, folder)


def _show(document: dict[str, Any]) -> None:
    table = Table("version", "undisturbed peers", "median, s", "last of them, s")
    for row in document["rows"]:
        step = f"{row['step']}{' (calm)' if row['calm'] else ' (the hub, too)' if row['hub_struck'] else ''}"
        table.add_row(
            step,
            f"{row['undisturbed']} of {row['waited_for']}",
            *(f"{row[k]:.2f}" if row[k] else "" for k in ("median_s", "last_s")),
        )
    console().print(table)
    table = Table(
        "at rest", "processes", "memory, MiB", "of the hub", "descriptors", "tasks", "CPU of the hub", "of a peer", "log, bytes/s"
    )
    for name, rest in zip(("before", "after"), document["rests"], strict=True):
        table.add_row(
            name, str(rest["processes"]), f"{rest['pss_bytes'] / MIB:.0f}", f"{rest['hub_anonymous_bytes'] / MIB:.0f}",
            str(rest["descriptors"]), str(rest["tasks"]), f"{rest['hub_cpu']:.2%}", f"{rest['peer_cpu']:.2%}", f"{rest['log_bytes_s']:.0f}",
        )  # fmt: skip
    console().print(table)
    blows = ", ".join(f"{count} × {what}" for what, count in sorted(document["blows"].items()))
    click.echo(
        f"{blows}; {len(document['wrong'])} with other bits; {document['bytes_duplicate']} bytes twice; {len(document['processes'])} processes. "
        f"Of {document['judged']} that lived long enough, memory grew by {document['typical_growth_bytes'] / MIB:.1f} MiB (median); "
        f"{len(document['grown'])} grew by more than they may{': ' if document['grown'] else ''}{', '.join(document['grown'])}; "
        f"the fleet {'is flat' if document['fleet_flat'] else 'has grown'}."
    )
