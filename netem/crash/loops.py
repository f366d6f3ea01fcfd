"""Real processes that are killed at one step of their disk, or request to a mirror, after another, and come back each time with what they had.

A hub with a mirror, two peers in a chain and a follower that knows the mirror alone, versions all the while. One process at a time is the victim: it dies by SIGKILL at a step drawn for it, before it or half-way through,
is started again to die at the next, and every few kills it may live: then all have to be at the newest version by themselves, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netem.crash.killed import KILL_AT
from netem.fleet import HUB, Fleet, FleetError
from netem.loopback import Net

FOLLOWER = "far"
PAYLOAD_BYTES = 512 * 1024
RATE_BYTES_S = 64e6
ROUND = 5
"""Kills of one victim in a row."""
FURTHEST = 150
"""Steps: those of a start, and of two or three versions."""
DEADLINE_S = 60.0
_LAST_WORDS = re.compile(r"killed at step \d+: (half of )?([\w ]+?) (/\S+)")


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    """By victim."""
    steps: Counter[str] = field(default_factory=Counter)
    """By what it was doing."""
    versions: int = 0
    checks: int = 0
    """How often all were current again, and compared."""
    wrong: list[str] = field(default_factory=list)


class MirroredFleet(Fleet):
    """The hub keeps a mirror in a folder, which ``FOLLOWER`` follows without it."""

    def __init__(self, folder: Path, peers: int) -> None:
        super().__init__(folder, Net(RATE_BYTES_S), peers, 1, PAYLOAD_BYTES, DEADLINE_S, "netem.crash.killed")
        self._mirror = f"file://{folder / 'mirror'}"
        self.options[HUB] = ["--mirror", self._mirror]
        self.options[FOLLOWER] = ["--from", self._mirror]

    async def _run(self, words: list[str], log: Path) -> Any:
        if FOLLOWER in words:
            del words[1]  # the hub's address
        return await super()._run(words, log)

    async def follow(self) -> None:
        """Have the follower begin: once there is something to follow."""

        async def look() -> bool:
            return self.is_newest((await self.answers(HUB))["mirror"]["version"])

        await self._until(look, lambda: f"{self.version} is on the mirror")
        self.names.append(FOLLOWER)
        await self.start(FOLLOWER)
        await self.live(FOLLOWER)


async def kill_loops(folder: Path, kills: int, seed: int, peers: int = 2) -> Tally:
    """Raises FleetError when somebody is not current again in time."""
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
    """Its place below a daemon's folders, without what is drawn at random or counted up."""
    parts = Path(path).relative_to(folder).parts or (".",)
    if parts[0] == "mirror":
        return "/".join([parts[0], *parts[3:4]])  # without the format's name and the run's
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", "/".join([parts[0], *parts[1:3]]))


async def _start(fleet: Fleet, name: str, kill_at: str) -> None:
    os.environ[KILL_AT] = kill_at
    try:
        await fleet.start(name)
    finally:
        del os.environ[KILL_AT]


async def _until_dead(fleet: Fleet, victim: str) -> None:
    """Versions go on until it has come to its step."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not await fleet.ended(victim, 0.5):
        at = await fleet.status(victim)
        if at is not None and fleet.is_newest(at.get("version" if victim == HUB else "committed")):
            fleet.publish()
        if loop.time() > deadline:
            raise FleetError(f"{victim} did not come to its step: {fleet.log(victim).read_text()[-1000:]}")
