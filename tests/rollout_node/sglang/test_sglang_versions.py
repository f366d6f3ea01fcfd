"""Thirty versions into a real SGLang server at tensor parallel 2, under streaming clients, beside SGLang's own load of
each folder. Prints the pauses; run with ``-s``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_run import DEADLINE_S, LiveRun, live_run
from real_server import one_off_connections
from real_sglang import SglangServer, generate

pytestmark = pytest.mark.prove  # test_sglang_server.py is the sample
PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]
CLIENTS, VERSIONS, OWN_LOADS = 8, 30, 6
SAMPLED = (10, 20, 30)
MODEL = """
from pathlib import Path
from netem.fleet.small_model import SmallModel, write_small_model
write_small_model(Path({folder!r}), SmallModel(2000, hidden=512, layers=8, spread=0.1), seed=1, dtype="bfloat16")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", MODEL.format(folder=str(model))], check=True, timeout=DEADLINE_S)
    with live_run(tmp_path, model, {}) as found:
        yield found


class Streams:
    """Clients that stream one long answer after the other. No request may fail."""

    def __init__(self, url: str) -> None:
        self.url, self.answers, self.tokens = url, 0, 0
        self.gaps_s: list[float] = []
        """Between two parts of one answer."""
        self._enough, self._running = False, 0
        self._may_begin, self._idle = asyncio.Event(), asyncio.Event()
        self._may_begin.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._stream(number))

    async def rest(self) -> None:
        """No request runs afterwards, until ``go_on``."""
        self._may_begin.clear()
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    def go_on(self) -> None:
        self._may_begin.set()

    def stop(self) -> None:
        self._enough = True

    async def _stream(self, number: int) -> None:
        async with one_off_connections(timeout=aiohttp.ClientTimeout(total=None)) as http:
            while not self._enough:
                await self._may_begin.wait()
                self._running += 1
                await self._answer(http, [10 + number, 30 + self.answers % 400], 40 + 7 * (self.answers % 9))
                self._running -= 1
                self._idle.set()

    async def _answer(self, http: aiohttp.ClientSession, prompt: list[int], tokens: int) -> None:
        last_s, found = time.monotonic(), 0
        async for part in parts(http, self.url, prompt, tokens):
            self.gaps_s.append(time.monotonic() - last_s)
            last_s, found = time.monotonic(), part["meta_info"]["completion_tokens"]
        assert found == tokens
        self.answers, self.tokens = self.answers + 1, self.tokens + tokens


async def parts(http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> AsyncIterator[dict[str, Any]]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    async with http.post(url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            text = line.decode().strip().removeprefix("data:").strip()
            if text and text != "[DONE]":
                yield json.loads(text)


async def said(http: aiohttp.ClientSession, url: str) -> list[Any]:
    """Greedy answers with their log-probabilities, one at a time."""
    answers = [await generate(http, url, prompt) for prompt in PROMPTS]
    return [[(logprob, token) for logprob, token, *_ in a["meta_info"]["output_token_logprobs"]] for a in answers]


async def own_load(http: aiohttp.ClientSession, url: str, folder: Path) -> float:
    """Seconds of pause, in which SGLang loads a folder by itself; running requests are retracted, as p2pcast does."""
    began_s = time.monotonic()
    for path, body in [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": str(folder)}),
        ("/continue_generation", {"torch_empty_cache": False}),
    ]:
        async with http.post(url + path, json=body) as response:
            assert response.status == 200, await response.text()
    return time.monotonic() - began_s


async def fresh(folder: Path, like: SglangServer) -> list[Any]:
    server = SglangServer(folder, like.log.parent / folder.name, *like.options, environment=like.environment)
    try:
        await asyncio.to_thread(server.wait)
        async with one_off_connections() as http:
            return await said(http, server.url)
    finally:
        await asyncio.to_thread(server.stop)


async def test_thirty_versions_under_streaming_clients(run: LiveRun) -> None:
    server, streams = run.server, Streams(run.server.url)
    load = asyncio.create_task(streams.run())
    ours: list[dict[str, Any]] = []
    answers, folders = {}, {}
    async with one_off_connections(timeout=aiohttp.ClientTimeout(total=None)) as http:
        for step in range(1, VERSIONS + 1):
            await asyncio.to_thread(run.publish)
            ours.append(await asyncio.to_thread(run.live))
            if step in SAMPLED:
                await streams.rest()
                await asyncio.to_thread(run.verified)
                answers[step] = await said(http, server.url)
                folders[step] = await asyncio.to_thread(run.save, run.folder / f"version{step}")
                streams.go_on()
        ours_gap_s = max(streams.gaps_s)
        run.processes.stop("peer")
        streams.gaps_s.clear()
        own = [await own_load(http, server.url, folders[SAMPLED[n % 3]]) for n in range(OWN_LOADS)]
        own_gap_s = max(streams.gaps_s)
        streams.stop()
        await load
    for step, folder in folders.items():
        if step == SAMPLED[0]:
            await asyncio.to_thread(server.stop)
        assert await fresh(folder, server) == answers[step], f"version 0.{step}"
    pauses = [entry["pause_s"] for entry in ours[1:]]
    print(f"\n{VERSIONS} versions, {streams.answers} streamed answers, {streams.tokens} tokens, 0 failed")
    print(f"p2pcast: pause {statistics.median(pauses):.4f} s, largest gap of a stream {ours_gap_s:.2f} s")
    print(f"SGLang's own load: {statistics.median(own):.4f} s, largest gap {own_gap_s:.2f} s")
    print(f"ratio {statistics.median(own) / statistics.median(pauses):.1f}")
