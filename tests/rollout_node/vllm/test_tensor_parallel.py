"""Many versions into a real vLLM server at tensor parallel 2; what the KV policies promise; and which version answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_server import PROMPTS, TWO_RANKS, Server, complete, load, loaded, make_model

from p2pcast.version import Version
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.vllm import KvPolicy, VllmInstaller

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LONG = " ".join(f"w{3 + i * 7 % 400}" for i in range(200))
"""More than one block of keys and values: its prefix is found again."""
STEPS = 2
RANKS = ["--tensor-parallel-size", "2", "--enable-scale-out"]
"""The second for the route that takes tokens and gives tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    return make_model(tmp_path_factory.mktemp("model") / "model")


def advance(run: Any) -> Version:
    version: Version = run.step(run.version.step + 1, share=0.05, bits=0x0180)
    return version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    found = Server(model, tmp_path_factory.mktemp("server"), *RANKS, environment=TWO_RANKS)
    try:
        found.wait()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module", autouse=True)
def truth(tmp_path_factory: pytest.TempPathFactory, server: Server, read_versions: Any) -> list[list[str]]:
    """What the engine answers to PROMPTS and LONG at 0.0, 0.1 and 0.2, when vLLM itself loads them."""
    folders = read_versions(server.model, tmp_path_factory.mktemp("truth"), advance, STEPS + 1)
    return loaded(server, folders, [*PROMPTS, LONG])


@pytest.fixture
def run(model: Path, make_run: Callable[..., Any], read_state: Callable[..., Any]) -> Any:
    return make_run(*read_state(model))


@asynccontextmanager
async def installing(server: Server, run: Any, kv: KvPolicy = "recompute") -> AsyncIterator[VllmInstaller]:
    socket = InstallSocket(server.install, run)
    await socket.start()
    installer = VllmInstaller(server.url, socket, run=str(run.folder), kv=kv)
    try:
        await installer.start()
        await install(installer, run)
        yield installer
    finally:
        await installer.close()
        await socket.close()


async def install(installer: VllmInstaller, run: Any) -> Any:
    await installer.stage(run.version, run.shadow.path)
    return await installer.commit(run.version)


async def holds(installer: VllmInstaller, run: Any) -> bool:
    found = await installer.audit(run.layout, run.digests)
    return (found.version, found.wrong, found.unknown) == (run.version, [], [])


@asynccontextmanager
async def streaming(server: Server, clients: int) -> AsyncIterator[None]:
    """Clients at work meanwhile, none of whose requests may fail."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        began, enough = [asyncio.Event() for _ in range(clients)], asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for i, event in enumerate(began):
                group.create_task(load(http, server.url, f"w{10 + i}", event, enough))
            await asyncio.gather(*(event.wait() for event in began))
            try:
                yield
            finally:
                enough.set()


async def test_twenty_versions_under_load(server: Server, run: Any) -> None:
    async with installing(server, run) as installer:
        assert await holds(installer, run)
        async with streaming(server, 4):
            for _ in range(20):
                advance(run)
                await install(installer, run)
                assert await holds(installer, run)
        assert [r["install"] for r in run.reports if r["phase"] == "prepare" and r["rank"] == 1] == ["dense"] + ["sparse"] * 20


async def prefix_hits(http: aiohttp.ClientSession, server: Server) -> float:
    async with http.get(server.url + "/metrics") as response:
        return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", await response.text(), re.MULTILINE)))


@pytest.mark.parametrize("kv", ["salt", "recompute"])
async def test_no_prefix_of_older_weights_is_found(server: Server, run: Any, truth: Any, kv: KvPolicy) -> None:
    """``salt``: the cache stays, and clients that name the version find what that version computed, and no more."""
    async with installing(server, run, kv) as installer, aiohttp.ClientSession() as http:
        for version in range(STEPS + 1):
            more = {"cache_salt": str(run.version)} if kv == "salt" else {}
            before = await prefix_hits(http, server)
            assert [await complete(http, server.url, p, **more) for p in [*PROMPTS, LONG]] == truth[version]
            assert await prefix_hits(http, server) == before
            assert await complete(http, server.url, LONG, **more) == truth[version][-1]
            assert await prefix_hits(http, server) > before
            if version < STEPS:
                advance(run)
                assert (await install(installer, run)).recomputed_tokens == 0


async def test_keep_finds_what_older_weights_computed(server: Server, run: Any, truth: Any) -> None:
    """What ``salt`` and ``recompute`` are for: with neither, a prompt that is asked again stands on old keys and values."""
    async with installing(server, run, "keep") as installer, aiohttp.ClientSession() as http:
        salt = {"cache_salt": "one for all"}
        assert await complete(http, server.url, LONG, **salt) == truth[0][-1]
        advance(run)
        before = await prefix_hits(http, server)
        assert (await install(installer, run)).recomputed_tokens == 0
        await complete(http, server.url, LONG, **salt)
        assert await prefix_hits(http, server) > before


ATTEMPTS = 8
"""To have a switch come while a request runs, on a machine that may be busy."""


async def test_the_token_route_tells_which_version_made_which_token(server: Server, run: Any) -> None:
    for _ in range(ATTEMPTS):
        before = str(run.version)
        spans = await _spans(server, run)
        assert sum(span["end"] - span["start"] for span in spans) == 200
        if len(spans) == 2:
            break
    assert [span["version"] for span in spans] == [before, str(run.version)]
    assert 0 == spans[0]["start"] < spans[0]["end"] == spans[1]["start"] < spans[1]["end"] == 200


async def _spans(server: Server, run: Any) -> list[dict[str, Any]]:
    """Which version made which of 200 tokens, while the next version is committed; only one where the request was over before."""
    body = {"token_ids": [50, 60, 70], "sampling_params": {"max_tokens": 200, "temperature": 0, "ignore_eos": True}}
    tokens, spans = 0, []
    async with installing(server, run) as installer, aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        advance(run)
        await installer.stage(run.version, run.shadow.path)
        async with http.post(server.url + "/inference/v1/generate", json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for part in json.loads(line[6:])["choices"]:
                        if not tokens:
                            group.create_task(installer.commit(run.version))
                        tokens += len(part["token_ids"] or [])
                        spans = part.get("weight_versions") or spans
    assert tokens == 200
    return spans
