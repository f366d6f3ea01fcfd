"""A run of two LoRA adapters, from the trainer's folders to a live vLLM server under requests of both adapters and of
the base model. Then a run of a model with one adapter beside it.

The whole proof prints what 50 versions of the adapters cost beside 50 versions of the model's whole state:
``pytest -s -m prove tests/daemons/engines/test_adapters.py``.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.ground.errors import LocalError
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))

from peft_folders import config, matrices, save, saved_state, state
from real_server import (
    LONG,
    PROMPTS,
    TWO_RANKS,
    Server,
    choice,
    load,
    make_model,
    one_off_connections,
    prefix_hits,
)

pytestmark = pytest.mark.vllm

VERSIONS, SAMPLE = 50, 6
ADAPTERS = ("one", "two")
WORKER = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
"""Options of a server that workers use."""
SHARES = {"adapters": 0.3, "whole state": 0.01}
"""Parts of the values that a step changes. Adapters learn at higher rates, so more of their values change."""


@pytest.fixture
async def servers(swarm: Any) -> AsyncIterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        await asyncio.to_thread(server.stop)


def larger_model(folder: Path) -> Path:
    """About 15 million weights."""
    script = f"""
from pathlib import Path
from netem.fleet.small_model import SmallModel, write_small_model
write_small_model(Path({str(folder)!r}), SmallModel(500, 512, 6, mlp=2, spread=0.1), seed=1, dtype="bfloat16")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900, capture_output=True)
    return folder


def adapters_of(model: Path, folder: Path) -> dict[str, Path]:
    """Two adapters of unlike ranks and layers, as PEFT saves them."""
    return {
        "one": save(folder / "one", matrices(model, seed=1, rank=8), config(rank=8, alpha=12)),
        "two": save(folder / "two", matrices(model, seed=2, targets=["q_proj", "v_proj"]), config(alpha=8)),
    }


def server_of(model: Path, folder: Path, adapters: dict[str, Path], ranks: int) -> Server:
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", **(TWO_RANKS if ranks == 2 else {})}
    options = [*lora_options(adapters), "--tensor-parallel-size", str(ranks)]
    return Server(model, folder, *options, environment=environment)


def lora_options(folders: dict[str, Path]) -> list[str]:
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    sizes = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--max-cpu-loras", "4"]
    return [*sizes, *WORKER, "--lora-modules", *modules]


class Broadcast:
    """Versions from the hub's folder to one server, while requests for ``models`` run."""

    def __init__(self, swarm: Any, peer: Any, server: Server, models: tuple[str, ...]) -> None:
        self.swarm, self.peer, self.server, self.models = swarm, peer, server, models
        self.pauses_s: list[float] = []
        self.bytes: list[int] = []
        self.requests = 0

    async def run(self, first: int, versions: int, now: Any, files: dict[str, bytes], share: float, states: Any) -> Any:
        """Publish and install them one after the other. Fails if any request does. Returns the last state."""
        began, enough = [asyncio.Event() for _ in self.models], asyncio.Event()
        async with one_off_connections() as http:
            streams = [
                asyncio.create_task(load(http, self.server.url, f"w{10 + i}", event, enough, model))
                for i, (event, model) in enumerate(zip(began, self.models, strict=True))
            ]
            await asyncio.gather(*(event.wait() for event in began))
            for step in range(first, first + versions):
                now = states.trained(now, step, share)
                self.swarm.publish(step, now, files)
                await self.live(f"0.{step}")
                self.pauses_s.append(self.peer.runners[0].report.pause_s)
                self.bytes.append(self.swarm.hub.publishing.lifecycle.published.bytes)
            enough.set()
            self.requests += sum(await asyncio.gather(*streams))
        return now

    async def live(self, version: str) -> None:
        runner = self.peer.runners[0]
        await self.swarm.until(lambda: runner.ready and str(self.peer.committed) == version, f"{version} is live")

    def figures(self, kind: str, state_bytes: int) -> str:
        return (
            f"{kind}: {len(self.bytes)} versions, {self.requests} whole requests, 0 failed; state {state_bytes:,}"
            f" bytes, median version {statistics.median(self.bytes):,.0f} bytes; pause median"
            f" {1e3 * statistics.median(self.pauses_s):.1f} ms, longest {1e3 * max(self.pauses_s):.1f} ms"
        )


async def broadcast_adapters(
    swarm: Any, states: Any, servers: list[Server], model: Path, versions: int, ranks: int = 1
) -> str:
    folders = adapters_of(model, swarm.folder / "peft")
    (swarm.folder / "a").mkdir(0o700)
    server = server_of(model, swarm.folder / "a", folders, ranks)
    servers.append(server)
    written, files = state(swarm.folder / "state", folders)
    now = states.read(written)
    swarm.publish(0, now, files)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",))
    await asyncio.to_thread(server.wait)
    found = Broadcast(swarm, peer, server, ("one", "two", "m"))
    await found.live("0.0")
    now = await found.run(1, versions - 1, now, files, SHARES["adapters"], states)
    async with one_off_connections() as http:  # the last version finds these prefixes in the cache
        for name in ADAPTERS:
            await choice(http, server.url, LONG, model=name)
            hits = await prefix_hits(http, server.url)
            await choice(http, server.url, LONG, model=name)
            assert await prefix_hits(http, server.url) > hits
    now = await found.run(versions, 1, now, files, SHARES["adapters"], states)
    assert found.requests >= 3
    assert [str(version) for version in peer.runners[0].versions] == [f"0.{step}" for step in range(versions + 1)]

    # An engine's own loader, given the last version's folders under other names, is the truth.
    last = states.write(swarm.folder / "last", now)
    saved = await asyncio.to_thread(saved_state, last / "model.safetensors", files, swarm.folder / "saved")
    async with one_off_connections() as http:
        for name in ADAPTERS:
            body = {"lora_name": f"truth-{name}", "lora_path": str(saved[name])}
            async with http.post(f"{server.url}/v1/load_lora_adapter", json=body) as response:
                assert response.status == 200, await response.text()
            for prompt in [*PROMPTS, LONG]:
                asked = [
                    await choice(http, server.url, prompt, model=named, logprobs=1)
                    for named in (name, f"truth-{name}", "m")
                ]
                assert asked[0]["token_ids"] == asked[1]["token_ids"] != asked[2]["token_ids"]
                assert asked[0]["logprobs"]["token_logprobs"] == asked[1]["logprobs"]["token_logprobs"]
    return found.figures("adapters", sum(len(contents) for _, _, contents in now.values()))


async def check_restart(swarm: Any, server: Server) -> None:
    """A restarted server holds its first folders, until it is filled again."""
    [peer] = swarm.peers.values()
    async with one_off_connections() as http:
        before = await choice(http, server.url, PROMPTS[0], model="one")
        await asyncio.to_thread(server.restart)
        await swarm.until(lambda: not peer.runners[0].ready, "it is missed")
        await asyncio.to_thread(server.wait)
        await swarm.until(lambda: peer.runners[0].ready, "it is filled again")
        assert (await choice(http, server.url, PROMPTS[0], model="one"))["token_ids"] == before["token_ids"]


@pytest.mark.prove  # tests/rollout_node/vllm/test_adapter_slots.py is the sample
@pytest.mark.parametrize("ranks", [1, 2])
async def test_adapter_versions_reach_a_server_under_requests(
    swarm: Any, states: Any, servers: list[Server], p2pcast: Any, ranks: int
) -> None:
    model = await asyncio.to_thread(make_model, swarm.folder / "model")
    await broadcast_adapters(swarm, states, servers, model, SAMPLE, ranks)
    done = await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")
    assert done.returncode == 0, done.stderr
    await check_worker(swarm, servers[0])


async def check_worker(swarm: Any, server: Server) -> None:
    """A worker's samples are those of the adapter that it names, and name the run's version."""
    [peer] = swarm.peers.values()
    host, port = peer.http.address
    tokens, scored = [5, 6, 7, 8, 9], []
    async with one_off_connections() as http:
        versions = EngineVersions(http, f"http://{host}:{port}", server.url)
        await versions.refresh()
        for adapter in ("one", "two", None):
            sampler = GenerateSampler(http, server.url, versions, adapter=adapter)
            assert await sampler.check() == str(peer.committed)
            scores, version = await sampler.score(tokens)
            assert version == peer.committed
            how: Any = {"seed": 1, "temperature": 1.0, "max_tokens": 8, "stop_token_ids": ()}
            sample = await sampler.of_play(lambda count: None).sample(tokens, **how)
            again, _ = await sampler.score([*tokens, *sample.token_ids])
            assert np.abs(again[len(tokens) :] - sample.logprobs).max() < 0.2  # batches change rounding
            scored.append(scores.tolist())
        assert scored[0] != scored[1] != scored[2] != scored[0]
        with pytest.raises(LocalError, match="serves no adapter three"):
            await GenerateSampler(http, server.url, versions, adapter="three").check()


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2])
async def test_versions_of_a_model_and_its_adapter_reach_a_server_under_requests(
    swarm: Any, states: Any, servers: list[Server], p2pcast: Any, ranks: int
) -> None:
    """The run's first version is the model alone. At the end the server is started without LoRA: it gets the model
    alone, and says what it lacks.
    """
    model = await asyncio.to_thread(make_model, swarm.folder / "model")
    peft = swarm.folder / "peft"
    first = save(peft / "first", matrices(model, seed=1, targets=["q_proj"]), config(alpha=3))
    adapter = save(peft / "phi", matrices(model, seed=2, rank=8, spread=0.05), config(rank=8, alpha=12))
    (swarm.folder / "a").mkdir(0o700)
    server = server_of(model, swarm.folder / "a", {"phi": first}, ranks)
    servers.append(server)
    theta, of_model = states.read(model), {p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json"}
    swarm.publish(0, theta, of_model)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", targets=(f"vllm:{server.url}",))
    await asyncio.to_thread(server.wait)
    found = Broadcast(swarm, peer, server, ("phi", "m"))
    await found.live("0.0")
    beside, files = state(swarm.folder / "state", {"phi": adapter})
    now, files = theta | states.read(beside), files | of_model
    swarm.publish(1, now, files)
    await found.live("0.1")
    now = await found.run(2, SAMPLE, now, files, SHARES["whole state"], states)
    assert [str(version) for version in peer.runners[0].versions] == [f"0.{step}" for step in range(SAMPLE + 2)]
    done = await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    assert "lacks" not in done.stdout

    # vLLM's own loader, given the last version's matrices under another name, is the truth.
    last = states.write(swarm.folder / "last", {n: t for n, t in now.items() if n.startswith("phi/")})
    saved = await asyncio.to_thread(saved_state, last / "model.safetensors", files, swarm.folder / "saved")
    async with one_off_connections() as http:
        body = {"lora_name": "truth", "lora_path": str(saved["phi"])}
        async with http.post(f"{server.url}/v1/load_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()

        async def asked(name: str) -> list[Any]:
            return [await choice(http, server.url, prompt, model=name, logprobs=1) for prompt in PROMPTS]

        answers = [
            [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in await asked(name)]
            for name in ("phi", "truth", "m")
        ]
        assert answers[0] == answers[1] != answers[2]

        await asyncio.to_thread(lambda: server.restart(*WORKER, "--tensor-parallel-size", str(ranks)))
        await swarm.until(lambda: not peer.runners[0].ready, "it is missed")
        await asyncio.to_thread(server.wait)
        await swarm.until(lambda: peer.runners[0].ready, "it is filled again")
        alone = [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in await asked("m")]
        assert alone == answers[2], "the adapter never changes the base's answers"
    swarm.publish(SAMPLE + 2, states.trained(now, SAMPLE + 2, SHARES["whole state"]), files)
    await found.live(f"0.{SAMPLE + 2}")
    done = await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")
    assert done.returncode == 0, done.stderr
    assert "lacks" in done.stdout
    assert peer.runners[0].status()["detail"]["lacks"] == "phi"
    print(found.figures("model and adapter", sum(len(contents) for _, _, contents in now.values())))


@pytest.mark.prove
async def test_fifty_versions_of_adapters_and_of_the_whole_state(
    swarm: Any, states: Any, servers: list[Server]
) -> None:
    model = await asyncio.to_thread(larger_model, swarm.folder / "model")
    told = [await broadcast_adapters(swarm, states, servers, model, VERSIONS)]
    print(told[0])
    await check_restart(swarm, servers[0])
    await swarm.all_down()
    await asyncio.to_thread(servers[0].stop)
    (swarm.folder / "whole").mkdir()
    other = type(swarm)(swarm.folder / "whole", swarm.folder / "whole")
    try:
        (other.folder / "a").mkdir(0o700)
        server = Server(model, other.folder / "a")
        servers.append(server)
        now = states.read(model)
        files = {p.name: p.read_bytes() for p in model.iterdir() if p.suffix == ".json"}
        other.publish(0, now, files)
        await other.hub_up()
        peer = await other.peer_up("a", targets=(f"vllm:{server.url}",))
        await asyncio.to_thread(server.wait)
        found = Broadcast(other, peer, server, ("m", "m", "m"))
        await found.live("0.0")
        now = await found.run(1, VERSIONS, now, files, SHARES["whole state"], states)
        told.append(found.figures("whole state", sum(len(contents) for _, _, contents in now.values())))
    finally:
        await other.all_down()
    print(told[1])
