"""Quantised vLLM servers beside a peer that quantises a run's versions for them. Under load, each engine's own weights
are the peer's, and its answers are those of a fresh engine.

``tests/rollout_node/vllm/test_models.py`` and ``test_vllm_life.py`` are the samples.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))

from real_server import PROMPTS, Server, complete, fresh, load, make_model, one_off_connections

pytestmark = [pytest.mark.vllm, pytest.mark.prove]
VERSIONS = 20


@pytest.fixture
async def servers(swarm) -> AsyncIterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("kind", ["fp8-channel", "int8-channel"])
@pytest.mark.parametrize("where", ["peer", "hub"])
async def test_twenty_versions_under_load(swarm, states, servers, p2pcast, kind: str, where: str) -> None:
    model = await asyncio.to_thread(make_model, swarm.folder / "model")
    started = swarm.folder / "started"
    done = await asyncio.to_thread(p2pcast, "quantise", model, "-o", started, "--kind", kind)
    assert done.returncode == 0, done.stderr
    state = states.read(model)
    files = {p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json" and "index" not in p.name}
    (swarm.folder / "a").mkdir(0o700)
    server = Server(started, swarm.folder / "a")
    servers.append(server)
    await asyncio.to_thread(server.wait)
    await swarm.hub_up(quantise=kind if where == "hub" else None)
    # The engine is the only target: no other one makes the copy for it.
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",), quantise=kind if where == "peer" else None)
    enough, begun = asyncio.Event(), asyncio.Event()
    async with one_off_connections() as http:
        clients = [asyncio.create_task(load(http, server.url, prompt, begun, enough)) for prompt in PROMPTS[:2]]
        await begun.wait()
        installs = []
        for step in range(VERSIONS):
            swarm.publish(step, state, files)
            await swarm.until(
                lambda step=step: str(peer.committed) == f"0.{step}" and peer.runners[0].ready, f"0.{step} is live"
            )
            installs.append(peer.runners[0].report.dense)
            code, answer = await swarm.post(peer, "/verify", {})
            assert code == 200
            rows = json.loads(answer)["engines"]
            assert [(row["version"], row["wrong"]) for row in rows] == [(f"0.{step}", [])]
            state = states.trained(state, step, share=0.02)
        enough.set()
        answered = await asyncio.gather(*clients)
        async with http.post(server.url + "/reset_prefix_cache") as response:
            assert response.status == 200
        said = [await complete(http, server.url, prompt) for prompt in PROMPTS]
    assert min(answered) > 0
    assert installs == [True] + [False] * (VERSIONS - 1), "the first install writes the whole state, the others edit"
    folder, last = swarm.folder / "last", swarm.checkpoints / f"step_{VERSIONS - 1}"
    done = await asyncio.to_thread(p2pcast, "quantise", last, "-o", folder, "--kind", kind)
    assert done.returncode == 0, done.stderr
    await asyncio.to_thread(server.stop)
    [expected] = await asyncio.to_thread(fresh, [folder], PROMPTS)
    assert said == expected
