"""A small soak: 6 real peers through 4 versions, with one fault or repair every second.

``python -m tests.chaos.soak`` is the large soak, which judges resources over time; here the fleet's sums while idle are
compared, before and after.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from p2pcast.process import event_loop
from tests.chaos.daemon_logs import printed_on_failure
from tests.chaos.fault_schedule import FAULTS, FaultSchedule
from tests.chaos.soak_report import document
from tests.chaos.soak_run import UNDISTURBED_VERSIONS, Soak

PEERS = 6
VERSIONS = 4
SEED = 7


def test_a_small_soak():
    event_loop.run(_soak())


async def _soak() -> None:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        fleet = LocalFleet(Path(folder), Net(4e6), PEERS, 2, 1_000_000, 900.0, "p2pcast.cli")
        with printed_on_failure(fleet):
            async with fleet:
                soak = Soak(fleet, VERSIONS, FaultSchedule(fleet.names, SEED, 2), 1.5, 900.0, rest_s=0.5)
                await soak.run()
                assert all(fleet.exact(name) for name in fleet.names)
    found = document(soak)
    assert found["wrong"] == []
    assert found["bytes_duplicate"] == 0
    assert [row["step"] for row in found["rows"]] == list(range(2, 2 + UNDISTURBED_VERSIONS + VERSIONS))
    assert found["rows"][0]["undisturbed"] == PEERS
    assert set(found["blows"]) & set(FAULTS)
    before, after = found["rests"]
    assert before["processes"] == after["processes"] == PEERS + 1
    assert found["fleet_flat"], (before, after)
