"""Chaos without a supervisor: a hub and five peers as real processes, of which three get ``kill -9`` during each of 20 versions and are started once, at once, as they were.

Nobody looks after them: a process that ends by itself, because the hub or a parent is away just then, fails the test. At the end all hold the newest version, bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from netem.fleet import HUB, POLL_S, Fleet
from netem.loopback import Net
from p2pcast import event_loop

PEERS = 5
VERSIONS = 20
STRUCK = 3
SEED = 16
BACK_S = 0.5
"""At most, from a process's death to its next start."""
SPREAD_S = 0.3
"""Within which the three of a version are struck: before it goes out, while it does, and when it has."""
DEADLINE_S = 120.0


def test_chaos_without_a_supervisor():
    event_loop.run(_chaos())


async def _chaos() -> None:
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = Fleet(Path(folder), Net(20e6), PEERS, 2, 1_000_000, DEADLINE_S, None, plaintext=False)
        try:
            async with fleet:
                for _ in range(VERSIONS):
                    fleet.publish()
                    struck = draw.sample([HUB, *fleet.names], STRUCK)
                    await asyncio.gather(*(_strike(fleet, name, draw.random(), draw.random()) for name in struck))
                    await _somebody_has(fleet, fleet.step)
                await _all_have_the_newest(fleet)
                fleet.still_run()
                assert [name for name in fleet.names if not fleet.exact(name)] == []
        except BaseException:
            for name in (HUB, *fleet.names):
                print(f"--- {name}\n{fleet.log(name).read_text()[-6000:]}" if fleet.log(name).exists() else f"--- {name}: no log")
            raise


async def _strike(fleet: Fleet, name: str, when: float, back: float) -> None:
    await asyncio.sleep(when * SPREAD_S)
    await fleet.kill(name)
    await asyncio.sleep(back * BACK_S)
    await fleet.start(name)


async def _all_have_the_newest(fleet: Fleet) -> None:
    """One version of the newest step: its branch is higher where the hub was killed after it had used a number."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            said = {(await fleet.status(name) or {}).get("committed") for name in fleet.names}
            if len(said) == 1 and str(said.pop()).endswith(f".{fleet.step}"):
                return
            fleet.still_run()
            await asyncio.sleep(POLL_S)


async def _somebody_has(fleet: Fleet, step: int) -> None:
    """The version has gone out to one peer at least: so the hub has got somewhere, too."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(fleet.installed(name, step) for name in fleet.names):
            fleet.still_run()
            await asyncio.sleep(POLL_S)
