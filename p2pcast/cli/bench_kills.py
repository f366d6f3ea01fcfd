"""``p2pcast bench kills``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast import event_loop
from p2pcast.cli.options import console, documented, handed_over
from p2pcast.errors import EXIT_FAILED


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="In all; hub, peers and follower in turn, five in a row.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the steps at which they die.")
@click.option("--on", type=click.Path(file_okay=False, path_type=Path), help="Folder on the disk to try.  [default: memory]")
@documented
def kills(kills: int, seed: int, on: Path | None, as_json: bool, output: Path | None) -> None:
    """A hub with a mirror, two peers and a follower of the mirror die by kill -9 at one write, sync, rename, store or request to the mirror after another, and come
    back each time.

    Every fifth time all have to be at the newest version by themselves, bit for bit. Exit code 1 if one is not.
    """
    from netem.crash.loops import kill_loops

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=on or "/dev/shm") as folder:
        tally = event_loop.run(kill_loops(Path(folder), kills, seed))
    document: dict[str, Any] = {
        "kills": dict(tally.kills), "steps": dict(tally.steps), "versions": tally.versions, "checks": tally.checks, "wrong": tally.wrong,
    }  # fmt: skip
    if not handed_over(document, output, as_json=as_json):
        table = Table("killed at", "times")
        for step, count in sorted(tally.steps.items()):
            table.add_row(step, str(count))
        console().print(table)
        victims = ", ".join(f"{name} {count}" for name, count in tally.kills.items())
        click.echo(
            f"{tally.kills.total()} kills ({victims}) over {tally.versions} versions; all current again by themselves, and compared, "
            f"{tally.checks} times; {len(tally.wrong)} with other bits"
        )
    if tally.wrong:
        sys.exit(EXIT_FAILED)
