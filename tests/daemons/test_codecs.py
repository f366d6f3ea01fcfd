"""Codecs from the hub to the peers' folders: the one that was told, and the one that is chosen by time."""

from __future__ import annotations

import pytest

from p2pcast.codec.cell import CONTEXT, FLAT
from p2pcast.codec.choice import MEASURED_BEFORE
from p2pcast.version import Version
from topology.model import DEFAULT_PEER_BPS


def codecs_of(hub, version: str) -> set[int]:
    stored = next(s for s in hub.store.artifacts.values() if s.version == Version.parse(version) and s.base is not None)
    return {placed.codec for placed in stored.assembly.directory}


@pytest.mark.parametrize(("told", "number"), [("context", CONTEXT), ("flat", FLAT)])
async def test_what_is_told_arrives_and_late_peers_follow_the_chain(swarm, states, told, number):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up(codec=told)
    await swarm.peer_up("a")
    await swarm.live("0.1")
    for step in (2, 3, 4):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}", swarm.peers["a"])
    assert number in codecs_of(swarm.hub, "0.3")
    await swarm.peer_up("late")
    await swarm.live("0.4")
    last = (await swarm.status(swarm.hub))["last"]
    assert (last["codec"], last["codec_why"]) == (told, "as told")


async def test_auto_goes_by_what_peers_report_and_learns_from_its_first_version(swarm, states, caplog):
    caplog.set_level("INFO", logger="p2pcast.hub")
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    assert swarm.hub.choosing.costs is MEASURED_BEFORE
    for step in (2, 3):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        await swarm.published(f"0.{step}")
    assert swarm.hub.choosing.costs is not MEASURED_BEFORE
    chosen = swarm.hub.outgoing.published.choice
    assert chosen.way.decode_cores == peer.staging.workers
    assert chosen.way.encode_cores == swarm.hub.staging.workers
    assert chosen.way.link_bps == pytest.approx(DEFAULT_PEER_BPS)
    last = (await swarm.status(swarm.hub))["last"]
    assert last["codec"] == chosen.codec
    assert last["codec_why"] == chosen.why
    assert f"version 0.3 went out in codec {chosen.codec}: {chosen.why}" in caplog.messages
    await swarm.peer_up("late")
    await swarm.live("0.3")
