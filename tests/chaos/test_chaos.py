"""Chaos without a supervisor: a hub and five peers as real processes. Three of them get ``kill -9`` during each
version, and are restarted once, immediately, with their stored state.

No supervisor restarts a process: a process that ends by itself, because the hub or a parent is away, fails the test. At
the end all peers hold the newest version, bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import pytest

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import POLL_S, LocalFleet
from p2pcast.process import event_loop
from tests.chaos.daemon_logs import printed_on_failure

PEERS = 5
STRUCK = 3
SEED = 16
BACK_S = 0.5
"""Longest time from a process's death to its restart."""
SPREAD_S = 0.3
"""Period in which the three kills of a version happen: before, during and after its publishing."""
DEADLINE_S = 600.0


@pytest.mark.parametrize("versions", [6, pytest.param(20, marks=pytest.mark.prove)])
def test_chaos_without_a_supervisor(versions):
    event_loop.run(_chaos(versions))


async def _chaos(versions: int) -> None:
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = LocalFleet(Path(folder), Net(20e6), PEERS, 2, 1_000_000, DEADLINE_S, None, plaintext=False)
        with printed_on_failure(fleet):
            async with fleet:
                for _ in range(versions):
                    fleet.publish()
                    struck = draw.sample([HUB, *fleet.names], STRUCK)
                    await asyncio.gather(*(_strike(fleet, name, draw.random(), draw.random()) for name in struck))
                    await _any_peer_has(fleet, fleet.step)
                await _all_have_the_newest(fleet)
                fleet.still_run()
                assert [name for name in fleet.names if not fleet.exact(name)] == []


async def _strike(fleet: LocalFleet, name: str, when: float, back: float) -> None:
    await asyncio.sleep(when * SPREAD_S)
    await fleet.kill(name)
    await asyncio.sleep(back * BACK_S)
    await fleet.start(name)


async def _all_have_the_newest(fleet: LocalFleet) -> None:
    """All peers hold one version of the newest step; its branch is higher if the hub was killed after using a
    number.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            said = {(await fleet.status(name) or {}).get("committed") for name in fleet.names}
            if len(said) == 1 and str(said.pop()).endswith(f".{fleet.step}"):
                return
            fleet.still_run()
            await asyncio.sleep(POLL_S)


async def _any_peer_has(fleet: LocalFleet, step: int) -> None:
    """Wait until at least one peer has the version, which shows that the hub made progress too."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(fleet.installed(name, step) for name in fleet.names):
            fleet.still_run()
            await asyncio.sleep(POLL_S)
