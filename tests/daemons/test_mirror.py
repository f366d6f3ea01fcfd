"""A run's copy in an object store: a hub that keeps it, peers that follow it without a hub, with a real S3 server behind a network that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'mirror'}"


async def mirrored(swarm: Any, version: str) -> None:
    await swarm.until(lambda: swarm.hub.mirroring.status()["version"] == version, f"{version} is on the mirror")


async def test_a_peer_without_a_hub_follows_the_run(swarm: Any, states: Any, url: str) -> None:
    state = states.first()
    swarm.publish(0, state)
    await swarm.hub_up(mirror=url)
    await mirrored(swarm, "0.0")
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.0")
    for step in (1, 2, 3):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    assert peer.mirrored.in_use
    assert not swarm.hub.sessions


async def test_the_mirror_steps_in_for_a_lost_swarm_and_steps_back(swarm: Any, states: Any, url: str) -> None:
    state = states.first()
    swarm.publish(0, state)
    hub = await swarm.hub_up(mirror=url)
    one = await swarm.peer_up("one", mirror=url)
    await swarm.live("0.0")
    assert not one.mirrored.in_use
    assert one.mirrored.bytes_received == 0
    await mirrored(swarm, "0.0")
    swarm.publish(1, states.trained(state, 1))
    await swarm.live("0.1")
    await mirrored(swarm, "0.1")
    await swarm.down(hub)
    await swarm.until(lambda: one.mirrored.in_use, "the mirror is turned to")
