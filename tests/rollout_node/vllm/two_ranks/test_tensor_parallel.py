"""Many versions into a real vLLM server at tensor parallel 2; the KV policies; the version behind each answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from real_server import LONG, PROMPTS, Server, complete, load, one_off_connections, prefix_hits
from shared_engine import Truth, advance

from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

STEPS = 2


@asynccontextmanager
async def installing(server: Server, run: Any, kv: KvPolicy = "recompute") -> AsyncIterator[EngineInstaller]:
    socket = InstallSocket(server.install, run)
    await socket.start()
    installer = EngineInstaller(VllmServer(server.url), socket, run=str(run.folder), kv=kv)
    try:
        await installer.start()
        await install(installer, run)
        yield installer
    finally:
        await installer.close()
        await socket.close()


async def install(installer: EngineInstaller, run: Any) -> Any:
    await installer.stage(run.version, run.shadow.path)
    return await installer.commit(run.version)


async def holds(installer: EngineInstaller, run: Any) -> bool:
    found = await installer.audit(run.layout, run.digests)
    return (found.version, found.wrong, found.unknown) == (run.version, [], [])


@asynccontextmanager
async def streaming(server: Server, clients: int) -> AsyncIterator[None]:
    """Clients at work meanwhile, none of whose requests may fail."""
    async with one_off_connections(timeout=aiohttp.ClientTimeout(total=None)) as http:
        began, enough = [asyncio.Event() for _ in range(clients)], asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for i, event in enumerate(began):
                group.create_task(load(http, server.url, f"w{10 + i}", event, enough))
            await asyncio.gather(*(event.wait() for event in began))
            try:
                yield
            finally:
                enough.set()


@pytest.mark.parametrize("versions", [3, pytest.param(20, marks=pytest.mark.prove)])
async def test_many_versions_under_load(server: Server, run: Any, versions: int) -> None:
    async with installing(server, run) as installer:
        assert await holds(installer, run)
        async with streaming(server, 4):
            for _ in range(versions):
                advance(run)
                await install(installer, run)
                assert await holds(installer, run)
        assert [r["install"] for r in run.reports if r["phase"] == "prepare" and r["rank"] == 1] == [
            "dense",
            *["sparse"] * versions,
        ]


@pytest.mark.parametrize("kv", ["salt", "recompute"])
async def test_prefixes_of_older_weights_are_not_reused(
    server: Server, run: Any, reference: Truth, kv: KvPolicy
) -> None:
    """``salt``: the cache stays, and clients that name the version find what that version computed, and no more."""
    async with installing(server, run, kv) as installer, one_off_connections() as http:
        for version in range(STEPS + 1):
            more = {"cache_salt": str(run.version)} if kv == "salt" else {}
            before = await prefix_hits(http, server.url)
            assert [await complete(http, server.url, p, **more) for p in [*PROMPTS, LONG]] == reference[version]
            assert await prefix_hits(http, server.url) == before
            assert await complete(http, server.url, LONG, **more) == reference[version][-1]
            assert await prefix_hits(http, server.url) > before
            if version < STEPS:
                advance(run)
                assert (await install(installer, run)).recomputed_tokens == 0


async def test_keep_reuses_prefixes_of_older_weights(server: Server, run: Any, reference: Truth) -> None:
    """Without ``salt`` and ``recompute``, a repeated prompt uses the older weights' keys and values."""
    async with installing(server, run, "keep") as installer, one_off_connections() as http:
        salt = {"cache_salt": "one for all"}
        assert await complete(http, server.url, LONG, **salt) == reference[0][-1]
        advance(run)
        before = await prefix_hits(http, server.url)
        assert (await install(installer, run)).recomputed_tokens == 0
        await complete(http, server.url, LONG, **salt)
        assert await prefix_hits(http, server.url) > before


ATTEMPTS = 8
"""To have a switch come while a request runs, on a machine that may be busy."""
MANY = 250
"""Tokens of one request: nearly as many as the model has positions for, so that a commit falls into it."""
ENOUGH = 100
"""Tokens within which other weights choose at least one other token."""


@pytest.mark.prove  # test_generate.py is the sample
async def test_token_route_states_the_version_of_each_token(server: Server, run: Any) -> None:
    """Each attempt proves the label: the old version alone gives the tokens that are labelled with it, and other tokens
    follow soon after.
    """
    for _ in range(ATTEMPTS):
        before = str(run.version)
        expected, tokens, spans = await _generate_across_a_commit(server, run)
        assert len(tokens) == MANY
        assert [span["version"] for span in spans] in ([before], [before, str(run.version)], [str(run.version)])
        assert [spans[0]["start"], spans[-1]["end"]] == [0, MANY]
        if spans[0]["version"] != before:
            continue
        assert tokens[: spans[0]["end"]] == expected[: spans[0]["end"]]
        if len(spans) == 2 and MANY - spans[1]["start"] >= ENOUGH:
            break
    assert [span["version"] for span in spans] == [before, str(run.version)]
    assert 0 < spans[0]["end"] == spans[1]["start"] < MANY
    assert tokens[spans[1]["start"] :][:ENOUGH] != expected[spans[1]["start"] :][:ENOUGH]


async def _generate_across_a_commit(server: Server, run: Any) -> tuple[list[int], list[int], list[dict[str, Any]]]:
    """Tokens by the version before alone; tokens of the same request, sent again and again until the next version is
    committed, with the spans of the last. Only one span where the commit fell between two requests.
    """
    body = {"token_ids": [50, 60, 70], "sampling_params": {"max_tokens": MANY, "temperature": 0, "ignore_eos": True}}
    before = str(run.version)
    commits: list[asyncio.Task[Any]] = []
    async with installing(server, run) as installer, one_off_connections() as http, asyncio.TaskGroup() as group:

        def begin() -> None:
            if not commits:
                commits.append(group.create_task(installer.commit(run.version), name="commit"))

        expected, _ = await _generate(http, server, body)
        advance(run)
        await installer.stage(run.version, run.shadow.path)
        tokens, spans = await _generate(http, server, body, begin)
        while [span["version"] for span in spans] == [before] and not commits[0].done():
            tokens, spans = await _generate(http, server, body)
    return expected, tokens, spans


async def _generate(
    http: aiohttp.ClientSession, server: Server, body: dict[str, Any], on_first: Callable[[], object] = lambda: None
) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens and spans of one streamed request; ``on_first`` is called with the first token."""
    tokens: list[int] = []
    spans: list[dict[str, Any]] = []
    async with http.post(server.url + "/inference/v1/generate", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for part in json.loads(line[6:])["choices"]:
                    if not tokens:
                        on_first()
                    tokens += part["token_ids"] or []
                    spans = part.get("weight_versions") or spans
    return tokens, spans
