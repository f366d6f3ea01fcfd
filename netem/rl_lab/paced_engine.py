"""An engine for measurements: samples really, from weights that it really installs, at a stated pace.

    main: PORT MODEL TOKENS_PER_S

The engine speaks vLLM's ``/inference/v1/generate``. ``POST /install?version=V&folder=DIR`` installs a checkpoint, for a
peer with ``--install exec:``. All tokens of an answer are sampled at its beginning, together with those of the other
requests that wait. They are sent at ``TOKENS_PER_S``. So an answer is of one version, and an installation waits for no
answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from netem.rl_lab.dense_star import WEIGHTS
from netem.rollouts.own_sampler import Turn, answers
from p2pcast.ground.version import Version
from p2pcast.tasks.task import Sample

PATH: Final = "/inference/v1/generate"
UNKNOWN: Final = Version(0, 0)
PART_S: Final = 0.5
"""Interval between two parts of an answer, in seconds. vLLM sends a part for each token; on one slow processor that
would take longer than the pace.
"""
GATHER_S: Final = 0.05
"""Time in seconds for which a request waits for others to be sampled together with it."""


class PacedEngine:
    """``tokens_per_s``: of each answer."""

    def __init__(self, model: Any, tokens_per_s: float, seed: int = 0) -> None:
        self._model, self._tokens_per_s = model, tokens_per_s
        self._generator = torch.Generator().manual_seed(seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2pcast-engine")
        self._waiting: list[tuple[Turn, asyncio.Future[Sample]]] = []
        self._gathering: asyncio.Task[None] | None = None
        self.version: Version | None = None
        """Of the installed weights; only the thread writes it."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post(PATH, self._generate), web.post("/install", self._install)]

    # -- weights

    async def _install(self, request: web.Request) -> web.Response:
        version, folder = Version.parse(request.query["version"]), Path(request.query["folder"])
        await asyncio.get_running_loop().run_in_executor(self._thread, self.install, version, folder)
        return web.Response()

    def install(self, version: Version, folder: Path) -> None:
        """Replace all weights by those of a checkpoint. Raises OSError, RuntimeError."""
        self._model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
        self.version = version

    # -- answers

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling, prompt = body["sampling_params"], tuple(body["token_ids"])
        if not body["stream"]:
            loop = asyncio.get_running_loop()
            return web.json_response(await loop.run_in_executor(self._thread, self._probe, prompt, sampling))
        turn = Turn(prompt, sampling["temperature"], sampling["max_tokens"], tuple(sampling["stop_token_ids"]))
        sample = await self._sampled(turn)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for part in self._paced(sample):
            await response.write(b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _sampled(self, turn: Turn) -> Sample:
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, future))
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._sample_waiting(), name="sampling")
        return await future

    async def _sample_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            together, self._waiting = self._waiting, []
            turns = [turn for turn, _ in together]
            try:
                samples = await asyncio.get_running_loop().run_in_executor(self._thread, self._answers, turns)
            except Exception as error:  # noqa: BLE001 - each request reports it
                for _, future in together:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), sample in zip(together, samples, strict=True):
                if not future.done():  # a request whose worker has gone
                    future.set_result(sample)
        self._gathering = None

    def _answers(self, turns: Sequence[Turn]) -> list[Sample]:
        return answers(self._model, turns, self._generator, self.version or UNKNOWN)

    async def _paced(self, sample: Sample) -> AsyncIterator[dict[str, Any]]:
        loop, count, sent = asyncio.get_running_loop(), len(sample.token_ids), 0
        began_s = loop.time()
        while sent < count:
            await asyncio.sleep(min(PART_S, (count - sent) / self._tokens_per_s))
            due = min(count, round((loop.time() - began_s) * self._tokens_per_s))
            if due > sent:
                yield choice(sample, sent, due)
                sent = due

    def _probe(self, prompt: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """One token, with its likeliest rivals."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([prompt])).logits[0, -1].float()
        logprobs = torch.log_softmax(logits / (sampling["temperature"] or 1.0), dim=-1)
        found = torch.topk(logprobs, max(1, sampling["logprobs"]))
        rivals = [
            {"token_id": t, "logprob": p} for t, p in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        ]
        span = {"version": str(self.version or "default"), "start": 0, "end": 1}
        content = [{**rivals[0], "top_logprobs": rivals[1:]}]
        said = {"token_ids": [rivals[0]["token_id"]], "logprobs": {"content": content}, "weight_versions": [span]}
        return {"choices": [{"index": 0, "finish_reason": "length", **said}]}


def choice(sample: Sample, start: int, end: int) -> dict[str, Any]:
    """The tokens from ``start`` to ``end`` in vLLM's form; with the span if they are the last ones."""
    tokens, logprobs = sample.token_ids[start:end], sample.logprobs[start:end]
    content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=True)]
    said: dict[str, Any] = {"index": 0, "token_ids": list(tokens), "logprobs": {"content": content}}
    if end == len(sample.token_ids):
        said["finish_reason"] = "stop" if sample.stop == "end" else "length"
        said["weight_versions"] = [{"version": str(s.version), "start": s.start, "end": s.end} for s in sample.spans]
    return said


async def _serve(engine: PacedEngine, port: int) -> None:
    app = web.Application()
    app.router.add_routes(engine.routes())
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    port, folder, tokens_per_s = sys.argv[1:]
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(folder).float().eval()
    asyncio.run(_serve(PacedEngine(model, float(tokens_per_s)), int(port)))
