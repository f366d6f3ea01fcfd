"""Publishing from folders and from ranks that waits for a slow fleet; a hub without a folder."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
from scripted_ranks import (
    FILES,
    T,
    Trainer,
)

from netem.fleet.processes import free_port
from tests.support.until import check_runs, until


@pytest.mark.parametrize("source", ["folder", "ranks"])
@pytest.mark.parametrize("end", ["commit", "leave"])
async def test_max_lag_holds_back(swarm, states, trainers, source, end):
    await swarm.hub_up(max_lag=1, commit="manual")
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    state = states.trained(state, 2)
    await trainer.publish(2, state)
    state = states.trained(state, 3)
    if source == "folder":
        swarm.publish(3, state)
    else:
        begun = asyncio.ensure_future(trainer.begin(3, state))
    await swarm.until(lambda: swarm.hub.publishing.backpressure.waiting_for == ["a"], "the hub waits for the peer")
    assert swarm.hub.publishing.pipeline.head == (0, 2)
    assert (await swarm.status(swarm.hub))["waiting_for"] == ["a"]
    await swarm.until(lambda: peer.staged == (0, 2), "0.2 is staged")
    if end == "commit":
        assert (await swarm.post(swarm.hub, "/commit", {"version": "0.2"}))[0] == 200
    else:
        await swarm.down(peer)
    if source == "ranks":
        trainer.say(trainer.script(await begun, state))
        await trainer.durable(3, state)
    await swarm.until(lambda: swarm.hub.publishing.pipeline.head == (0, 3), "0.3 is out")
    assert swarm.hub.publishing.backpressure.waiting_for == []


async def test_a_rank_that_dies_while_the_fleet_is_waited_for(swarm, states, trainers):
    await swarm.hub_up(max_lag=0, commit="manual")
    peer = await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    begun = asyncio.ensure_future(trainer.begin(2, state))
    await swarm.until(lambda: swarm.hub.publishing.backpressure.waiting_for == ["a"], "the hub waits for the peer")
    trainer.ranks[1].link.close()
    assert "rank 1 of 2 is gone" in (await trainer.ranks[0].hear(T.ABORTED))["reason"]
    begun.cancel()
    await swarm.until(lambda: not swarm.hub.publishing.pipeline.turn.locked(), "others may publish")
    await swarm.down(peer)
    again = await trainers(1)
    again.previous = trainer.previous
    await again.publish(2, states.trained(state, 2))
    assert swarm.hub.publishing.pipeline.head == (0, 2)


async def test_the_command_needs_no_folder(states, tmp_path, tmpfs):
    address = ("127.0.0.1", free_port())
    options = [
        "--state",
        tmp_path / "hub",
        "--shadow",
        tmpfs / "hub",
        "--token-file",
        tmp_path / "token",
        "--max-lag",
        3,
    ]
    words = ["seed", "--plaintext", "--listen", f"127.0.0.1:{address[1]}", "--http", "127.0.0.1:0", *options]
    hub = await asyncio.create_subprocess_exec(sys.executable, "-m", "p2pcast.cli", *map(str, words))
    try:
        await until((tmp_path / "hub" / "daemon.json").exists, check=lambda: check_runs(hub))
        trainer = Trainer(SimpleNamespace(folder=tmp_path, address=address, steps={}), 2)
        await trainer.up()
        state = states.first()
        await trainer.publish(1, state, files=FILES)
        assert (await trainer.publish(2, states.trained(state, 2)))["version"] == [0, 2]
        for rank in trainer.ranks:
            rank.link.abort()
    finally:
        hub.terminate()
        assert await hub.wait() == 0
