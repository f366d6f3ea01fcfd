"""A daemon's start records the owner of its shadow, and removes shadows whose state folder is gone."""

from __future__ import annotations

import json
import shutil

import pytest

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.daemon.daemon_process import shadow_prefix
from p2pcast.state.shadow import Shadow
from p2pcast.state.stale_shadows import OWNER_NAME, claim, sweep
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (100,))])


@pytest.mark.parametrize("who", ["hub", "peer"])
async def test_a_start_removes_abandoned_shadows(swarm, states, monkeypatch, who):
    swarm.publish(1, states.first())
    if who == "peer":
        await swarm.hub_up()
    place = swarm.tmpfs / "shm"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(sweep, "__defaults__", (place,))
    folders = {}
    for name in ("gone", "kept"):
        folders[name] = place / f"{shadow_prefix()}{name}"
        with state_lock(swarm.folder / name):
            claim(swarm.folder / name, folders[name])
            Shadow.create(folders[name], LAYOUT).close()
    shutil.rmtree(swarm.folder / "gone")
    shadow = place / f"{shadow_prefix()}mine"
    if who == "hub":
        daemon = await swarm.hub_up(shadow=shadow)
        await swarm.published("0.1")
    else:
        daemon = await swarm.peer_up("a", shadow=shadow)
        await swarm.live("0.1")
    assert sorted(place.iterdir()) == sorted([folders["kept"], shadow])
    record = json.loads((shadow / OWNER_NAME).read_text())
    assert record["state"] == str(daemon.config.state)
    # The next start goes on with the same shadow.
    await swarm.down(daemon)
    again = await (swarm.hub_up(shadow=shadow) if who == "hub" else swarm.peer_up("a", shadow=shadow))
    assert json.loads((shadow / OWNER_NAME).read_text()) == record
    await swarm.down(again)
    sweep()
    assert shadow.exists()
