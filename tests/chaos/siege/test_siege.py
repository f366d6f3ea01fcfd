"""A small siege of real daemons: every version arrives, no attack connection is kept for long, and logs stay small."""

from __future__ import annotations

import pytest

from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from p2pcast.ground.limits import MIB
from tests.chaos.siege.attack_table import kinds
from tests.chaos.siege.siege_run import run_siege

CONNECTIONS = 150
MORE_BYTES = 128 * MIB
"""Memory growth allowed during the siege: usually 12 MiB, but up to 68 in the first run on a machine."""
FRAMES = 5000


@pytest.fixture(params=[pytest.param(False, id="tls"), pytest.param(True, id="plaintext", marks=pytest.mark.prove)])
async def fleet(tmp_path, request):
    async with LocalFleet(tmp_path, Net(8 * MIB), 2, 1, MIB, deadline_s=900, plaintext=request.param) as fleet:
        yield fleet


async def test_honest_peers_do_not_notice(fleet):
    outcome = await run_siege(fleet, CONNECTIONS, FRAMES, at_once=CONNECTIONS, seed=1, rest_s=0)
    assert outcome.wrong == []
    assert outcome.duplicate_bytes == 0
    tally = outcome.tally
    assert tally["connections"] == CONNECTIONS == sum(tally.get(kind, 0) for kind in kinds(tls=not fleet.plaintext))
    assert tally["frames"] > FRAMES / 2
    assert tally.get("held for good", 0) == tally.get("given up", 0) == 0
    assert outcome.unexpected == []
    assert outcome.log_bytes < 500 * CONNECTIONS
    for held in outcome.held.values():
        assert held["anonymous_bytes"]["most"] < held["anonymous_bytes"]["before"] + MORE_BYTES
        assert held["descriptors"]["most"] < held["descriptors"]["before"] + CONNECTIONS + 50
