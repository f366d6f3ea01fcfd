"""A small soak: 6 real peers through 4 versions, with one fault or repair every second.

``p2pcast bench soak`` is the large soak, which judges resources over time; here the fleet's sums while idle are
compared, before and after.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from netem.chaos.fault_schedule import FAULTS, FaultSchedule
from netem.chaos.soak import UNDISTURBED_VERSIONS, Soak
from netem.chaos.soak_report import document
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import HUB, Fleet
from p2pcast.process import event_loop

PEERS = 6
VERSIONS = 4
SEED = 7


def test_a_small_soak():
    event_loop.run(_soak())


async def _soak() -> None:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = Fleet(Path(folder), Net(4e6), PEERS, 2, 1_000_000, 90.0, "p2pcast.cli")
        try:
            async with fleet:
                soak = Soak(fleet, VERSIONS, FaultSchedule(fleet.names, SEED, 2), 1.5, 90.0, rest_s=0.5)
                await soak.run()
                assert all(fleet.exact(name) for name in fleet.names)
        except BaseException:
            for name in (HUB, *fleet.names):
                print(
                    f"--- {name}\n{fleet.log(name).read_text()}" if fleet.log(name).exists() else f"--- {name}: no log"
                )
            raise
    found = document(soak)
    assert found["wrong"] == []
    assert found["bytes_duplicate"] == 0
    assert [row["step"] for row in found["rows"]] == list(range(2, 2 + UNDISTURBED_VERSIONS + VERSIONS))
    assert found["rows"][0]["undisturbed"] == PEERS
    assert set(found["blows"]) & set(FAULTS)
    before, after = found["rests"]
    assert before["processes"] == after["processes"] == PEERS + 1
    assert found["fleet_flat"], (before, after)
