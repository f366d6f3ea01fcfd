"""``python -m tests.chaos.soak``: a long soak of many processes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from p2pcast.cli import exit_code
from p2pcast.cli.options import PATH, RateParameter, documented, written
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop
from tests.chaos.fault_schedule import FaultSchedule
from tests.chaos.soak_report import document, show
from tests.chaos.soak_run import Soak

CHAIN = 8
"""Approximate number of peers in a chain."""
OUT_SHARE = 6
"""Number of peers divided by the most that are disturbed at the same time."""


@click.command()
@click.option("--peers", type=click.IntRange(2), default=48, help="Number of peers.")
@click.option(
    "--versions", type=click.IntRange(1), default=20, help="Number of versions with faults, after three without."
)
@click.option(
    "--seed", type=int, default=0, help="Seed of the fault schedule: which peers, which faults, and when they end."
)
@click.option("--payload", type=click.IntRange(1), default=2, help="Size of a version in MiB.")
@click.option(
    "--rate", type=RateParameter(), default="16mbit", help="Rate of the path between two processes, in bits per second."
)
@click.option("--every", type=click.FloatRange(0), default=5.0, help="Shortest time in seconds between two versions.")
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=90.0,
    help="Time limit in seconds for a version to reach all undisturbed peers.",
)
@click.option(
    "--hub",
    "with_hub",
    is_flag=True,
    help="Faults of the hub too; the times then leave out the versions published during such a fault.",
)
@click.option(
    "--fork",
    is_flag=True,
    help="Processes forked from one that has imported all modules, so that hundreds fit into memory.",
)
@click.option("--logs", type=PATH, help="Folder for the processes' logs.  [default: logs are deleted]")
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
    """Publish many versions while every second a peer is killed, leaves, freezes, slows down or returns.

    A hub and peers run as processes on this machine, behind proxies that limit the rate; no privileges needed. Every
    version is compared bit for bit at every undisturbed peer, the last version at all peers. Memory, descriptors and
    tasks are sampled throughout. Exit code 1: a comparison failed, or a process grew.
    """
    found = event_loop.run(
        _measure(peers, versions, seed, payload * MIB, rate / 8, every, deadline, with_hub, fork, logs)
    )
    if not written(found, output, as_json=as_json):
        show(found)
    if not found["ok"]:
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
    program = None if fork else "p2pcast.cli"
    chains = max(1, peers // CHAIN)
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with LocalFleet(
            Path(folder), Net(rate_bytes_s), peers, chains, payload_bytes, deadline_s, program
        ) as fleet:
            struck = [HUB, *fleet.names] if with_hub else fleet.names
            storm = FaultSchedule(struck, seed, max(1, peers // OUT_SHARE), lasting=(HUB,))
            run = Soak(fleet, versions, storm, every_s, deadline_s)
            try:
                await run.run()
            finally:
                if logs is not None:
                    _keep(fleet, logs)
            asked = {"peers": peers, "versions": versions, "seed": seed, "chains": chains}
            return asked | {"payload_bytes": payload_bytes, "rate_bits_s": rate_bytes_s * 8} | document(run)


def _keep(fleet: LocalFleet, folder: Path) -> None:
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for log in fleet.folder.glob("*.log"):
            shutil.copy(log, folder)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: soak(standalone_mode=False)))
