"""A daemon's start records the owner of its shadow, and removes shadows without state folder or use."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.limits import SHADOW_KEPT_DAYS
from p2pcast.process.daemon_process import shadow_prefix
from p2pcast.state.shadow import Shadow
from p2pcast.state.stale_shadows import OWNER_NAME, UNUSED_NAME, claim, leave, sweep
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (100,))])


@pytest.mark.parametrize("who", ["hub", "peer"])
async def test_a_start_removes_abandoned_shadows(swarm, states, monkeypatch, caplog, who):
    caplog.set_level(logging.INFO, "p2pcast.state")
    swarm.publish(1, states.first())
    if who == "peer":
        await swarm.hub_up()
    place = swarm.tmpfs / "shm"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(sweep, "__defaults__", (place, SHADOW_KEPT_DAYS))
    folders = {}
    for name in ("gone", "kept", "old"):
        folders[name] = place / f"{shadow_prefix()}{name}"
        with state_lock(swarm.folder / name):
            claim(swarm.folder / name, folders[name])
            Shadow.create(folders[name], LAYOUT).close()
    shutil.rmtree(swarm.folder / "gone")
    leave(folders["old"])
    os.utime(folders["old"] / UNUSED_NAME, (0, 0))
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
    assert not (shadow / UNUSED_NAME).exists()
    await swarm.down(daemon)
    assert f"GB in {shadow}; `p2pcast clean` removes it" in caplog.text
    assert (shadow / UNUSED_NAME).exists()
    again = await (swarm.hub_up(shadow=shadow) if who == "hub" else swarm.peer_up("a", shadow=shadow))
    assert json.loads((shadow / OWNER_NAME).read_text()) == record
    await swarm.down(again)
    sweep()
    assert shadow.exists()
