"""``python -m tests.chaos.kills``: real processes that are killed at a chosen disk step or mirror request, again and
again, and restart each time with their stored state.

The fleet is a hub with a mirror, two peers in a chain, and a follower that uses the mirror alone; versions are
published all the while. One process at a time is the victim. SIGKILL ends it before a randomly drawn step or half-way
through, and the restarted process dies at the next drawn step. Every few kills the victim is left alone: then all
processes must reach the newest version by themselves, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from netem.fleet.processes import ChildProcess, FleetError
from p2pcast.cli import exit_code
from p2pcast.cli.options import console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.process import event_loop
from tests.chaos import killed_command
from tests.chaos.killed_command import KILL_AT

FOLLOWER = "far"
PAYLOAD_BYTES = 512 * 1024
RATE_BYTES_S = 64e6
ROUND = 5
"""Consecutive kills of one victim."""
FURTHEST = 150
"""Largest step drawn: covers a start and two or three versions."""
DEADLINE_S = 180.0
_LAST_WORDS = re.compile(r"killed at step \d+: (half of )?([\w ]+?) (/\S+)")


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by victim."""
    steps: Counter[str] = field(default_factory=Counter)
    """Kills by the kind of step."""
    versions: int = 0
    checks: int = 0
    """Number of times that all processes had the newest version and were compared."""
    wrong: list[str] = field(default_factory=list)


class MirroredFleet(LocalFleet):
    """The hub keeps a mirror in a folder; ``FOLLOWER`` reads the mirror without the hub."""

    def __init__(self, folder: Path, peers: int) -> None:
        program = Path(killed_command.__file__)
        super().__init__(folder, Net(RATE_BYTES_S), peers, 1, PAYLOAD_BYTES, DEADLINE_S, program)
        self._mirror = f"file://{folder / 'mirror'}"
        self.options[HUB] = ["--mirror", self._mirror]
        self.options[FOLLOWER] = ["--from", self._mirror]

    def _run(self, name: str, words: list[str]) -> ChildProcess:
        if name == FOLLOWER:
            del words[1]  # the hub's address
        return super()._run(name, words)

    async def follow(self) -> None:
        """Start the follower as soon as the mirror has a version."""

        async def mirror_is_newest() -> bool:
            return self.is_newest((await self.answers(HUB))["mirror"]["version"])

        await self.until(mirror_is_newest, lambda: f"{self.version} is on the mirror")
        self.names.append(FOLLOWER)
        await self.start(FOLLOWER)
        await self.live(FOLLOWER)


async def kill_loops(folder: Path, kills: int, seed: int, peers: int = 2) -> Tally:
    """Raises FleetError if a process does not reach the newest version in time."""
    draw, tally = random.Random(seed), Tally()
    async with MirroredFleet(folder, peers) as fleet:
        await fleet.follow()
        victims = [HUB, *fleet.names]
        in_a_row = min(ROUND, max(1, kills // len(victims)))
        for number in range(0, kills, in_a_row):
            victim = victims[number // in_a_row % len(victims)]
            await fleet.kill(victim)
            for _ in range(min(in_a_row, kills - number)):
                await _start(fleet, victim, f"{draw.randint(1, FURTHEST)}{' torn' * draw.randint(0, 1)}")
                await _until_dead(fleet, victim)
                tally.kills[victim] += 1
            await _start(fleet, victim, "")
            fleet.publish()
            await fleet.live(*fleet.names)
            tally.checks += 1
            tally.wrong += [f"{name} at {fleet.version}" for name in fleet.names if not fleet.exact(name)]
        tally.versions = fleet.step
        for name in victims:
            for match in _LAST_WORDS.finditer(fleet.log(name).read_text()):
                tally.steps[f"{match[1] or ''}{match[2]} {_kind(match[3], folder)}"] += 1
    return tally


def _kind(path: str, folder: Path) -> str:
    """The path below a daemon's folders, with random and counted parts replaced."""
    parts = Path(path).relative_to(folder).parts
    if parts and parts[0] in ("state", "shadows", "peers"):
        parts = parts[1:]
    parts = parts or (".",)
    if parts[0] == "mirror":
        return "/".join([parts[0], *parts[3:4]])  # without the names of the format and the run
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", "/".join([parts[0], *parts[1:3]]))


async def _start(fleet: LocalFleet, name: str, kill_at: str) -> None:
    os.environ[KILL_AT] = kill_at
    try:
        await fleet.start(name)
    finally:
        del os.environ[KILL_AT]


async def _until_dead(fleet: LocalFleet, victim: str) -> None:
    """Publish versions until the victim has reached its step."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not await fleet.ended(victim, 0.5):
        at = await fleet.status(victim)
        if at is not None and fleet.is_newest(at.get("version" if victim == HUB else "committed")):
            fleet.publish()
        if loop.time() > deadline:
            raise FleetError(f"{victim} did not reach its step: {fleet.log(victim).read_text()[-1000:]}")


# -- the program


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


if __name__ == "__main__":
    sys.exit(exit_code(lambda: kills(standalone_mode=False)))
