"""Codecs from the hub to the peers' folders: a fixed codec, and the choice by predicted time."""

from __future__ import annotations

import pytest

from p2pcast.codec.cell import CONTEXT, FLAT
from p2pcast.codec.codec_prediction import MEASURED_BEFORE
from p2pcast.ground.version import Version
from topology.broadcast_time import DEFAULT_PEER_BPS


def codecs_of(hub, version: str) -> set[int]:
    stored = next(
        s for s in hub.state.store.artifacts.values() if s.version == Version.parse(version) and s.base is not None
    )
    return {placed.codec for placed in stored.assembly.directory}


@pytest.mark.parametrize(("told", "number"), [("context", CONTEXT), ("flat", FLAT)])
async def test_the_set_codec_is_used_and_late_peers_follow_the_chain(swarm, states, told, number):
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
    assert (last["codec"], last["codec_why"]) == (told, "configured")


async def test_auto_codec_follows_peer_reports_and_the_first_version(swarm, states, caplog):
    caplog.set_level("INFO", logger="p2pcast.hub")
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    assert swarm.hub.publishing.codec_choice.costs is MEASURED_BEFORE
    for step in (2, 3):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
        await swarm.published(f"0.{step}")
    assert swarm.hub.publishing.codec_choice.costs is not MEASURED_BEFORE
    chosen = swarm.hub.publishing.lifecycle.published.choice
    assert chosen.way.decode_cores == peer.startup.staging.workers
    assert chosen.way.encode_cores == swarm.hub.state.staging.workers
    assert chosen.way.link_bps == pytest.approx(DEFAULT_PEER_BPS)
    last = (await swarm.status(swarm.hub))["last"]
    assert last["codec"] == chosen.codec
    assert last["codec_why"] == chosen.why
    assert f"version 0.3 was sent in codec {chosen.codec}: {chosen.why}" in caplog.messages
    await swarm.peer_up("late")
    await swarm.live("0.3")
