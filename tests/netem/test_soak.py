"""A small soak: 8 real peers through 5 versions while every second somebody is killed, leaves, is frozen, slows down or comes back.

``p2pcast bench soak`` is the large one, and judges what processes hold over time; here the fleet's sums are compared at rest, before and after.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from netem.fleet import HUB, Fleet
from netem.loopback import Net
from netem.soak import CALM_VERSIONS, Soak
from netem.soaked import document
from netem.storm import BLOWS, Storm
from p2pcast import event_loop

PEERS = 8
VERSIONS = 5
SEED = 7


def test_a_small_soak():
    event_loop.run(_soak())


async def _soak() -> None:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = Fleet(Path(folder), Net(4e6), PEERS, 2, 1_000_000, 90.0, "p2pcast.cli")
        try:
            async with fleet:
                soak = Soak(fleet, VERSIONS, Storm(fleet.names, SEED, 2), 1.5, 90.0, rest_s=0.5)
                await soak.run()
                assert all(fleet.exact(name) for name in fleet.names)
        except BaseException:
            for name in (HUB, *fleet.names):
                print(f"--- {name}\n{fleet.log(name).read_text()}" if fleet.log(name).exists() else f"--- {name}: no log")
            raise
    found = document(soak)
    assert found["wrong"] == []
    assert found["bytes_duplicate"] == 0
    assert [row["step"] for row in found["rows"]] == list(range(2, 2 + CALM_VERSIONS + VERSIONS))
    assert found["rows"][0]["undisturbed"] == PEERS
    assert set(found["blows"]) & set(BLOWS)
    before, after = found["rests"]
    assert before["processes"] == after["processes"] == PEERS + 1
    assert found["fleet_flat"], (before, after)
