"""A real vLLM server, the only target of a peer that quantises for it: it starts late and loads slowly, dies, returns
with its first weights, and outlives its peer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))

from real_server import PROMPTS, Server, complete, make_model, one_off_connections

KIND = "fp8-channel"
pytestmark = pytest.mark.vllm


@pytest.fixture
async def servers(swarm) -> AsyncIterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        await asyncio.to_thread(server.stop)


async def test_a_server_through_its_life(swarm, states, servers, p2pcast):
    model = await asyncio.to_thread(make_model, swarm.folder / "model", tied=True)
    started = swarm.folder / "started"
    done = await asyncio.to_thread(p2pcast, "quantise", model, "-o", started, "--kind", KIND)
    assert done.returncode == 0, done.stderr
    state = states.read(model)
    files = {p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json" and "index" not in p.name}
    (swarm.folder / "a").mkdir(0o700)
    server = Server(started, swarm.folder / "a")
    servers.append(server)

    async def verified(version: str, peer) -> None:
        """Live and ready, and every tensor in the engine's own memory is that version's."""
        await swarm.until(lambda: peer.runners[0].ready and str(peer.committed) == version, f"{version} is live")
        assert (await swarm.get(peer, "/readyz"))[0] == 200
        done = await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")
        assert done.returncode == 0, done.stderr

    # The peer is there long before the server answers; versions come and go meanwhile.
    await swarm.hub_up()
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",), quantise=KIND)
    for step in (0, 1):
        swarm.publish(step, state, files)
        await swarm.until(lambda s=step: str(peer.staged) == f"0.{s}", "it is staged")
        state = states.trained(state, step)
    assert not peer.runners[0].started
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    assert "is the server up" in (await swarm.status(peer))["engines"][0]["error"]
    await asyncio.to_thread(server.wait)
    await verified("0.1", peer)
    assert [str(v) for v in peer.runners[0].versions] == ["0.1"]
    async with one_off_connections() as http:
        before = [await complete(http, server.url, prompt) for prompt in PROMPTS]

    # A dead server is not ready. After its restart it holds its first folder, until it is filled again.
    os.killpg(server.process.pid, signal.SIGKILL)
    await asyncio.to_thread(server.process.wait)
    await swarm.until(lambda: not peer.runners[0].ready, "it is missed")
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    server.restart()
    await asyncio.to_thread(server.wait)
    await verified("0.1", peer)
    assert [str(v) for v in peer.runners[0].versions] == ["0.1", "0.1"]
    async with one_off_connections() as http:
        assert [await complete(http, server.url, prompt) for prompt in PROMPTS] == before

    # Another peer takes over: it verifies the weights, and does not rewrite correct weights.
    await swarm.down(peer)
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",), quantise=KIND)
    await verified("0.1", peer)
    assert peer.runners[0].report.pause_s == 0
    swarm.publish(2, state, files)
    await verified("0.2", peer)
    async with one_off_connections() as http:
        now = [await complete(http, server.url, prompt) for prompt in PROMPTS]
    assert now != before

    # The engine computes its head with the embedding. A fresh server unties a head that differs.
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    other = states.trained(state, 3)[embedding]

    async def refused(step: int, weights) -> None:
        swarm.publish(step, weights, files)
        runner, version = peer.runners[0], f"0.{step}"
        said = f"version {version} is refused: its {head} differs from its {embedding}"
        await swarm.until(lambda: said in (runner.error or ""), f"{version} is refused by name")
        assert (runner.ready, str(runner.committed)) == (False, verified_last)
        assert (await swarm.get(peer, "/readyz"))[0] == 503
        async with one_off_connections() as http:
            assert [await complete(http, server.url, prompt) for prompt in PROMPTS] == now
            async with http.get(server.url + "/weight_info") as response:
                assert (await response.json())["weight_version"] == verified_last

    verified_last = "0.2"
    await refused(3, state | {head: other})  # a layout with one more tensor: a whole install
    assert (await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")).returncode == 4
    swarm.publish(4, state | {head: state[embedding]}, files)
    await verified("0.4", peer)
    verified_last = "0.4"
    await refused(5, state | {head: other})  # a delta
    swarm.publish(6, state | {head: other, embedding: other}, files)
    await verified("0.6", peer)
