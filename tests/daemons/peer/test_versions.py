"""A peer's GET /versions: by it a worker names the weights that made its tokens."""

from __future__ import annotations

import aiohttp


async def test_versions_name_the_engines_weights_by_their_manifests(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1", peer)
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2", peer)
    host, port = peer.http.address
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/versions") as answer:
        found = await answer.json()
    assert (found["staged"], found["kv"]) == ("0.2", "recompute")
    assert set(found["stretches"].values()) <= {None}
    assert set(found["engines"].values()) <= {"0.2"}
    sealed = {str(s.version): s.manifest.identity.hex() for s in swarm.hub.state.store.artifacts.values()}
    assert found["manifests"] == sealed
    assert len(set(sealed.values())) == 2
