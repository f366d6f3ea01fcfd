"""A hub that is killed at any step of its disk, and a trainer that computes the step again with other bytes. Real
processes: no two engines ever show one version with two states.

Each time the hub is started to die at one random step of its disk while versions go on. Then the newest step gets other
bytes, and the hub restarts. Throughout, the version and the bytes of every engine are sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import POLL_S, LocalFleet
from p2pcast.process import event_loop
from tests.chaos import killed_command
from tests.chaos.killed_command import KILL_AT
from tests.support.until import until

KILLS = 1
MORE_KILLS = int(os.environ.get("P2PCAST_EQUIVOCATIONS", "6"))
"""In `make prove`; another number is drawn where the variable says so."""
FURTHEST = 90
"""Steps of the disk: those of a start, and of two versions."""
DEADLINE_S = 600.0


@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, id="more", marks=pytest.mark.prove)])
def test_no_two_engines_ever_show_one_version_with_two_states(kills):
    event_loop.run(_equivocate(random.Random(16), kills))


async def _equivocate(draw: random.Random, kills: int) -> None:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = LocalFleet(Path(folder), Net(64e6), 3, 2, 256 * 1024, DEADLINE_S, Path(killed_command.__file__))
        async with fleet:
            shown: dict[str, set[str]] = defaultdict(set)
            watching = asyncio.ensure_future(_watch(fleet, shown))
            try:
                for number in range(kills):
                    await fleet.kill(HUB)
                    await _start_to_die(fleet, f"{draw.randint(8, FURTHEST)}{' torn' * draw.randint(0, 1)}")
                    fleet.publish_again(1_000_000 + number)
                    await fleet.start(HUB)
                    await _all_exact(fleet)
                    fleet.publish()
                    await _all_exact(fleet)
                    assert not watching.done()
            finally:
                watching.cancel()
            assert {version: states for version, states in shown.items() if len(states) > 1} == {}
            assert len(shown) > kills
            for name in fleet.names:
                _verify_live(fleet, name)


async def _start_to_die(fleet: LocalFleet, kill_at: str) -> None:
    """The hub dies by itself, at its step; until then versions go on."""
    os.environ[KILL_AT] = kill_at
    try:
        await fleet.start(HUB)
    finally:
        del os.environ[KILL_AT]
    async with asyncio.timeout(DEADLINE_S):
        while not await fleet.ended(HUB, 0.2):
            said = await fleet.status(HUB)
            if said is not None and fleet.is_newest(said.get("version")):
                fleet.publish()


async def _all_exact(fleet: LocalFleet) -> None:
    """Every peer has installed what the trainer wrote last as the newest step, whichever version that became."""
    await until(
        lambda: [name for name in fleet.names if not _exact(fleet, name)],
        "the last version is at each peer",
        holds=lambda left: not left,
        check=fleet.still_run,
    )


def _exact(fleet: LocalFleet, name: str) -> bool:
    try:
        return fleet.exact(name)
    except (FileNotFoundError, ValueError):  # the step is not there yet, or is being replaced
        return False


async def _watch(fleet: LocalFleet, shown: dict[str, set[str]]) -> None:
    while True:
        for name in fleet.names:
            if (seen := await asyncio.to_thread(_served, fleet.core.installed(name) / "latest")) is not None:
                shown[seen[0]].add(seen[1])
        await asyncio.sleep(POLL_S)


def _served(latest: Path) -> tuple[str, str] | None:
    """The version that an engine which reads this folder serves, and its bytes; None while it is being replaced."""
    try:
        folder = latest.resolve(strict=True)
        version = (folder / "STABLE").read_text()
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        again = (folder / "STABLE").read_text()
    except OSError:
        return None
    return (version.strip(), digest) if version == again and version.strip() else None


def _verify_live(fleet: LocalFleet, name: str) -> None:
    """The engine's own digest is what the hub signed."""
    done = subprocess.run(
        [sys.executable, "-m", "p2pcast.cli", "verify", "--live", "--state", fleet.core.state(name)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
