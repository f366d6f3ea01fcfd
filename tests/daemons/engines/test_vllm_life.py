"""A real vLLM server, the only target of a peer that quantises for it: it starts late and loads slowly, dies, returns
with its first weights, and outlives its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))
sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from ledger_stage import config_of, running
from parity_task import Parity
from real_server import PROMPTS, Server, complete, make_model, one_off_connections

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Registration
from p2pcast.rollouts.result import Span
from p2pcast.tasks.play import result_of
from rollout_node.engine.runner import CHECK_S
from rollout_node.installers.engine_installer import SILENT_S
from rollout_node.worker.engine_versions import EngineVersions, Served, UnnamedWeights
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from trainer_node.ledger_server.callers import WORKER_FILE

KIND = "fp8-channel"
VOCABULARY = 500
PREFILLS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
"""Lengths of prompts in tokens. They grow until one step lasts longer than a silence that counts as frozen. On a busy
machine, the step of the longest would outlast the time limit of the peer's own commands.
"""
FROZEN = {
    "VLLM::EngineCore": "no sign of life of the engine core",
    "VLLM::Worker": "no sign of life of rank 0",
    "vllm.entrypoints.openai.api_server": "GET /health: no answer",
}
FLAGS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", str(PREFILLS[-1] + 8)]
FLAGS += ["--max-num-batched-tokens", str(PREFILLS[-1] + 8), "--no-enable-chunked-prefill"]
pytestmark = pytest.mark.vllm


@pytest.fixture
async def servers(swarm) -> AsyncIterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        await asyncio.to_thread(server.stop)


class Labels(UnnamedWeights):
    """Notes the engine's labels."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def span(self, label: str) -> Span:
        self.seen.append(label)
        return await super().span(label)


class Rollouts:
    """A ledger, and a worker of the engine and its peer."""

    def __init__(self, ledger: Any, folder: Path, http: aiohttp.ClientSession, engine: str, peer: str) -> None:
        url = f"http://127.0.0.1:{ledger.http.address[1]}"
        self.engine, self.http = engine, http
        self.ledger = LedgerClient(http, url, (folder / WORKER_FILE).read_text().strip())
        self.versions, self.task = EngineVersions(http, peer, engine), Parity()
        self.task.vocabulary = VOCABULARY
        self.sampler = GenerateSampler(http, engine, self.versions)
        config, player = WorkerConfig(name="honest", slots=1), JobPlayer(self.task)
        self.loop = PlayLoop(config, player, self.ledger, self.sampler, self.versions)

    async def submitted(self, served: Served) -> Sequence[Any]:
        """Verdicts on a sample of the engine as it is, by a worker that leases though its engine has no version."""
        about = Registration("hasty", 1, self.task.name, self.task.hash, leases=[])
        session = await self.ledger.register(about)
        (lease,) = (await self.ledger.lease(session.session, 1, served, 5.0)).leases
        labels = Labels()
        played = await self.task.play(GenerateSampler(self.http, self.engine, labels), lease.job)
        assert set(labels.seen) == {"none"}
        named = result_of(lease.job, lease.lease, played, 0.0, self.versions.schedule)
        result = dataclasses.replace(named, spans=())
        return await self.ledger.hand_in(session.session, [result])


def process_of(server: Server, title: str) -> int:
    """Of the server's processes."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if os.getpgid(int(entry.name)) == server.process.pid:
                words = (entry / "cmdline").read_text(errors="replace").split("\0")
                if words[0].startswith(title) or title in words:
                    return int(entry.name)
    raise AssertionError(f"no process {title}")


@contextlib.asynccontextmanager
async def frozen(swarm, peer, server: Server, title: str, said: str) -> AsyncIterator[None]:
    """A process of the engine is stopped in the block, and the engine is unready before its commands' time ends."""
    runner, process = peer.runners[0], process_of(server, title)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
        await swarm.until(lambda: not runner.ready, f"{title} is missed")
        (row,) = (await swarm.status(peer))["engines"]
        assert (row["ready"], runner.fault) == (False, None)
        assert said in row["error"]
        assert (await swarm.get(peer, "/readyz"))[0] == 503
    finally:
        os.kill(process, signal.SIGCONT)


def cpu_waits_s(server: Server) -> dict[str, float]:
    """By thread of the server's processes: how long it has waited for a core since its start, in seconds."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if os.getpgid(int(entry.name)) == server.process.pid:
                for thread in (entry / "task").iterdir():
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


async def prefilled(swarm, peer, server: Server, length: int) -> int:
    """Looks at the signs of life during a prefill that holds up the engine's commands: the engine stays ready, unless
    this machine stood still shortly before, or other processes had the engine's cores for most of a silence.
    """
    runner, looks, heard, stood_still_s, looked_s = peer.runners[0], 0, 0.0, 0.0, time.monotonic()
    waits: deque[tuple[float, dict[str, float]]] = deque([(looked_s, cpu_waits_s(server))])

    def starved() -> bool:
        before = waits[0][1]
        return max(waited - before.get(thread, 0.0) for thread, waited in cpu_waits_s(server).items()) > SILENT_S / 2

    async with one_off_connections() as http:
        prompt = [3 + (i + length // 1000) % 400 for i in range(length)]  # no prefix of another length's
        asking = asyncio.create_task(complete(http, server.url, prompt, max_tokens=1))
        while not asking.done():
            code, before_s, looked_s = (await swarm.get(peer, "/readyz"))[0], looked_s, time.monotonic()
            stood_still_s = looked_s if looked_s - before_s > CHECK_S else stood_still_s
            if looked_s - waits[-1][0] > CHECK_S:
                waits.append((looked_s, cpu_waits_s(server)))
            while len(waits) > 1 and waits[1][0] < looked_s - SILENT_S:
                waits.popleft()
            assert code == 200 or looked_s - stood_still_s < SILENT_S or starved()
            looks, heard = looks + (runner._heard_s != heard), runner._heard_s
            await asyncio.sleep(0.05)
        await asking
    return looks


async def test_a_server_through_its_life(swarm, states, servers, p2pcast):
    model = await asyncio.to_thread(make_model, swarm.folder / "model", tied=True, positions=PREFILLS[-1] + 8)
    started = swarm.folder / "started"
    done = await asyncio.to_thread(p2pcast, "quantise", model, "-o", started, "--kind", KIND)
    assert done.returncode == 0, done.stderr
    state = states.read(model)
    files = {p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json" and "index" not in p.name}
    (swarm.folder / "a").mkdir(0o700)
    server = Server(started, swarm.folder / "a", *FLAGS)
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
    await swarm.until(lambda: (peer.runners[0].ready, peer.committed) == (False, None), "it is missed")
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    (row,) = (await swarm.status(peer))["engines"]
    assert (row["committed"], row["ready"]) == (None, False)
    served = Served(Version(0, 1), peer.view.identities()[Version(0, 1)], None, peer.ident.hex(), row["name"])
    (swarm.folder / "ledger").mkdir(0o700)
    config = config_of(swarm.folder / "ledger", last_step=1)
    config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, vocabulary=VOCABULARY))
    async with running(config) as ledger, one_off_connections() as http:
        peer_url = f"http://127.0.0.1:{peer.http.address[1]}"
        rollouts = Rollouts(ledger, config.state, http, server.url, peer_url)
        bearer = {"Authorization": f"Bearer {ledger.http.access.bearer}"}
        async with peer.runners[0]._busy:  # no install meanwhile
            server.restart()
            await asyncio.to_thread(server.wait)
            async with http.get(server.url + "/weight_info") as answer:
                assert await answer.json() == {"weight_version": "none"}
            async with http.post(server.url + "/update_weight_version", json={"new_version": "0.1"}) as answer:
                assert answer.status == 500, "another program's label, without its weights"
            (row,) = (await swarm.status(peer))["engines"]
            assert (row["committed"], row["ready"]) == (None, False)
            body = {"version": "0.1", "manifest": served.manifest.hex()}
            async with http.post(rollouts.ledger._url + "/v1/versions", json=body, headers=bearer) as answer:
                assert answer.status == 200, await answer.text()
            (verdict,) = await rollouts.submitted(served)
            assert (verdict.accepted, verdict.reason) == (False, "no version")
            with pytest.raises(RetryableError, match="has no version yet"):
                await rollouts.versions.refresh()
            with pytest.raises(RetryableError, match="no peer installed"):
                await rollouts.sampler.sample([5], seed=1, temperature=1.0, max_tokens=2, stop_token_ids=())
        working = asyncio.create_task(rollouts.loop.run())
        await verified("0.1", peer)
        await swarm.until(lambda: rollouts.loop.verdicts.total() > 0 or working.done(), "a rollout is judged")
        assert set(rollouts.loop.verdicts) == {"accepted"}
        working.cancel()
        async with http.get(rollouts.ledger._url + "/status", headers=bearer) as answer:
            status = await answer.json()
        assert {worker["blamed"] for worker in status["workers"]} == {0}
        assert status["rejections"] == {"no version": 1}
    assert [str(v) for v in peer.runners[0].versions] == ["0.1", "0.1"]
    async with one_off_connections() as http:
        assert [await complete(http, server.url, prompt) for prompt in PROMPTS] == before

    # Another peer takes over: it verifies the weights, and does not rewrite correct weights.
    await swarm.down(peer)
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",), quantise=KIND)
    await verified("0.1", peer)
    assert peer.runners[0].report.pause_s == 0

    # A frozen process of the engine is missed, also while a version is staged. A long prefill raises no alarm.
    for title, said in FROZEN.items():
        async with frozen(swarm, peer, server, title, said):
            swarm.publish(2, state, files)
        await verified("0.2", peer)
    for length in PREFILLS:
        if await prefilled(swarm, peer, server, length) > SILENT_S / CHECK_S:
            break
    else:
        pytest.fail("no prefill lasted longer than a silence")
    async with one_off_connections() as http:
        now = [await complete(http, server.url, prompt) for prompt in PROMPTS]
    assert now != before
    assert len(set(now)) == len(PROMPTS), "the engine reads its prompts"

    # The engine computes its head with the embedding. A fresh server unties a head that differs.
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    other = states.trained(state, 3)[embedding]

    async def refused(step: int, weights, said: str = f"its {head} differs from its {embedding}", **more) -> None:
        swarm.publish(step, weights, files | more)
        runner, version = peer.runners[0], f"0.{step}"
        said = f"version {version} is refused: {said}"
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

    # The engine computes with the settings that it was started with.
    async with one_off_connections() as http:
        now = [await complete(http, server.url, prompt) for prompt in PROMPTS]
    verified_last = "0.6"
    config = json.dumps(json.loads(files["config.json"]) | {"rms_norm_eps": 0.5}).encode()
    state = states.trained(state | {head: other, embedding: other}, 7)
    said = "its settings differ from those with which this engine was started, in rms_norm_eps;"
    await refused(7, state | {head: state[embedding]}, said, **{"config.json": config})
    swarm.publish(8, state | {head: state[embedding]}, files)
    await verified("0.8", peer)
