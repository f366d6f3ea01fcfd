"""The orderly end of a peer: its children get other parents first, and no peer receives a byte twice."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from p2pcast.process.daemon_process import run_until_signal

BIG = {"model.weight": ("bfloat16", (8, 1_000_000))}


async def chain_of_three(swarm: Any, states: Any) -> tuple[list[Any], Any]:
    """Head, middle, tail, all at version 0.0."""
    state = states.first(shapes=BIG)
    swarm.publish(0, state)
    hub = await swarm.hub_up(chains=1)
    peers = {p.ident: p for p in await swarm.peers_up("a", "b", "c")}
    await swarm.live("0.0")
    order = [bytes.fromhex(ident) for ident in hub.fleet.membership.plan.chains[0]]
    row = [peers[ident] for ident in order]
    above = [hub.ident, *order[:-1]]
    await swarm.until(lambda: [p.relay.parent_failover.parent for p in row] == above, "the chain stands")
    return row, state


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_children_move_before_a_drained_peer_ends(swarm: Any, states: Any, place: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("rollout_node.peer.DRAIN_S", 600.0)
    row, state = await chain_of_three(swarm, states)
    leaving = row[place]
    before = leaving.node.bytes_received
    swarm.publish(1, states.trained(state, 1, share=1.0))
    await swarm.until(
        lambda: leaving.node.bytes_received > before + 100_000, "the next version is on its way through it"
    )
    await leaving.drain()
    assert leaving.node.downstream.fed == 0
    assert not leaving.view.ready()[0]
    assert leaving.view.status()["state"] == "draining"
    await swarm.down(leaving)
    stayed = [p for p in row if p is not leaving]
    await swarm.live("0.1", *stayed)
    assert [p.node.bytes_duplicate for p in stayed] == [0, 0]
    assert len(swarm.hub.state.sessions) == 2


async def test_without_a_hub_a_drained_peer_ends_at_once(swarm: Any, states: Any) -> None:
    row, _ = await chain_of_three(swarm, states)
    await swarm.down(swarm.hub)
    await swarm.until(lambda: not row[0].startup.hub_session.connected, "the hub is missed")
    await row[0].drain()
    assert not row[0].sync.activity.draining


async def test_the_first_signal_drains_the_second_ends() -> None:
    asked = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def drain() -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("drain")

    told = asyncio.ensure_future(run_until_signal(work, drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asked.wait()
    assert ended == []
    os.kill(os.getpid(), signal.SIGTERM)
    await told
    assert ended == ["work", "drain"]


async def test_work_that_ends_while_draining_ends_the_daemon() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    async def drain() -> None:
        await asyncio.sleep(0)

    told = asyncio.ensure_future(run_until_signal(work, drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await told
