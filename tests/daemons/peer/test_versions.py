"""A peer's GET /versions: by it a worker names the weights that made its tokens."""

from __future__ import annotations

import aiohttp
from blake3 import blake3

from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from tests.support.until import until


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


async def test_schedules_of_sparse_attention_are_named_by_their_files(swarm, states):
    """A folder with a malformed one is skipped, with the reason; the others are published."""
    state = states.first()
    schedule = BudgetSchedule((29, 61)).to_bytes()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1", peer)
    swarm.publish(2, states.trained(state, 2), {FILE: b'{"values": []}'})
    await swarm.until(lambda: "step_2" in swarm.hub.publishing.lifecycle.skipped, "the hub skips it")
    assert "a schedule has values" in swarm.hub.publishing.lifecycle.skipped["step_2"]
    swarm.publish(3, states.trained(state, 3), {FILE: schedule})
    await swarm.live("0.3", peer)
    found = await versions_of(peer)
    assert found["schedules"] == {"0.3": blake3(schedule).hexdigest()}
    assert found["sparse"] == []
    assert set(found["manifests"]) == {"0.1", "0.3"}


async def test_the_hub_names_the_version_of_each_engine(swarm, states):
    """For the ledger."""
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    peers = await swarm.peers_up("a", "b")
    await swarm.live("0.1", *peers)
    names = {peer.ident.hex(): [runner.installer.name for runner in peer.runners] for peer in peers}
    row = {"region": "", "staged": "0.1"}
    expected = {node: row | {"engines": dict.fromkeys(found, "0.1")} for node, found in names.items()}
    await until(lambda: versions_of(hub), "the peers' next reports", holds=lambda found: found["engines"] == expected)
    assert all(names.values())
