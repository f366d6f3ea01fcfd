"""A peer's GET /versions: by it a worker names the weights that made its tokens."""

from __future__ import annotations

import asyncio

import aiohttp


async def versions_of(daemon):
    host, port = daemon.http.address
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/versions") as answer:
        return await answer.json()


async def test_versions_name_the_engines_weights_by_their_manifests(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1", peer)
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2", peer)
    found = await versions_of(peer)
    assert (found["staged"], found["kv"]) == ("0.2", "recompute")
    assert found["node"] == peer.ident.hex()
    assert set(found["stretches"].values()) <= {None}
    assert set(found["engines"].values()) <= {"0.2"}
    sealed = {str(s.version): s.manifest.identity.hex() for s in swarm.hub.state.store.artifacts.values()}
    assert found["manifests"] == sealed
    assert len(set(sealed.values())) == 2


async def test_the_hub_names_the_version_of_each_engine(swarm, states):
    """For the ledger."""
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    peers = await swarm.peers_up("a", "b")
    await swarm.live("0.1", *peers)
    names = {peer.ident.hex(): [runner.installer.name for runner in peer.runners] for peer in peers}
    row = {"region": "", "staged": "0.1"}
    expected = {node: row | {"engines": dict.fromkeys(found, "0.1")} for node, found in names.items()}
    while (await versions_of(hub))["engines"] != expected:  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # until the peers' next reports
    assert all(names.values())
