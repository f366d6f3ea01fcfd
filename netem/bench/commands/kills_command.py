"""``p2pcast bench kills``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.process import event_loop


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(1),
    default=60,
    help="Number of kills in all: of hub, peers and mirror follower in turn, five each.",
)
@click.option("--seed", type=int, default=0, help="Seed of the random choice of operations to kill at.")
@click.option(
    "--on", type=click.Path(file_okay=False, path_type=Path), help="Folder on the disk to test.  [default: memory]"
)
@documented
def kills(kills: int, seed: int, on: Path | None, as_json: bool, output: Path | None) -> None:
    """Kill a hub with a mirror, two peers and a follower of the mirror with kill -9, and restart the killed process.
    Each kill comes at one write, sync, rename, store or mirror request.

    After every fifth kill all processes must reach the newest version without help, bit for bit. Exit code 1: one did
    not.
    """
    from netem.chaos.crash.kill_loops import kill_loops

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=on or "/dev/shm") as folder:
        tally = event_loop.run(kill_loops(Path(folder), kills, seed))
    document: dict[str, Any] = {
        "kills": dict(tally.kills),
        "steps": dict(tally.steps),
        "versions": tally.versions,
        "checks": tally.checks,
        "wrong": tally.wrong,
    }
    if not written(document, output, as_json=as_json):
        table = Table("killed at", "times")
        for step, count in sorted(tally.steps.items()):
            table.add_row(step, str(count))
        console().print(table)
        victims = ", ".join(f"{name} {count}" for name, count in tally.kills.items())
        click.echo(
            f"{tally.kills.total()} kills ({victims}) over {tally.versions} versions; {tally.checks} times all "
            "processes "
            f"were current again and compared; {len(tally.wrong)} with wrong bits"
        )
    if tally.wrong:
        sys.exit(EXIT_FAILED)
