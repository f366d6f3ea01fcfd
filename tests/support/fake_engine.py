"""An HTTP server that speaks vLLM's generate, OpenAI's completions and a peer's /versions: a model of 16 tokens."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from blake3 import blake3

VOCABULARY = 16
NODE = "e0" * 16
"""Of the peer."""
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


def digest_of(version: str) -> str:
    return blake3(version.encode()).hexdigest()


def logprobs(context: Sequence[int], version: str, temperature: float) -> list[float]:
    """Of the next token, by a model whose logits are drawn from the context and the version."""
    drawn = random.Random(f"{version} {list(context)}")
    logits = [drawn.uniform(-3, 3) / temperature for _ in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


@dataclass
class FakeEngine:
    """``versions``: served in turn, each for ``tokens_a_version`` tokens of all requests; the last one stays.
    ``mode``: ``processed``, ``raw`` or ``logits``. ``gate``: tokens come while it is set. ``asked``: bodies.
    ``true_weights``: the version that computes in truth, whatever version is named.
    """

    versions: list[str] = field(default_factory=lambda: ["0.1"])
    tokens_a_version: int = 0
    mode: str = "processed"
    scale_out: bool = True
    reports_versions: bool = True
    kv: str = "recompute"
    true_weights: str | None = None
    writing: bool = False
    """The peer is writing weights."""
    choice_change: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of each choice of a completion."""
    on_asked: Callable[[int], None] = lambda count: None
    """Called with the number of requests so far."""
    on_look: Callable[[int], None] = lambda count: None
    """Called with the number of requests to the peer so far."""
    looks: int = 0
    names_epochs: bool = True
    schedules: dict[str, str] | None = None
    """Names of schedules by version, for an engine with sparse attention; None: dense, at a peer that names none."""
    experts: tuple[int, int] | None = None
    """Layers, and experts of a token: as of vLLM with --enable-return-routed-experts."""
    experts_missing: int = 0
    """Rows that an answer leaves out."""
    finish: str | None = None
    status: int = 200
    max_model_len: int | None = None
    """Longest prompt and sample together. As by vLLM, a prompt without room for a token is refused, and a sample ends
    early.
    """
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    cut: int = 0
    """Requests that their clients ended."""

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Condition()
        self._made = 0
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/versions", self._versions)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        self.gate.set()
        await self._runner.cleanup()

    async def until_running(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.running >= count)

    async def until_cut(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.cut >= count)

    @property
    def version(self) -> str:
        step = self._made // self.tokens_a_version if self.tokens_a_version else 0
        return self.versions[min(step, len(self.versions) - 1)]

    async def _versions(self, request: web.Request) -> web.Response:
        self.looks += 1
        self.on_look(self.looks)
        known = [v for v in self.versions if v != "none"]
        epoch = f"epoch of {self.version}" if self.kv == "drain" and not self.writing else None
        document: dict[str, Any] = {
            "run": "00",
            "node": NODE,
            "kv": self.kv,
            "staged": known[-1] if known else None,
            "engines": {f"vllm:{self.url}": self.version} if self.version != "none" else {},
            "manifests": {v: digest_of(v) for v in known},
        }
        if self.schedules is not None:
            document |= {"sparse": [f"vllm:{self.url}"], "schedules": self.schedules}
        if self.names_epochs:
            document["stretches"] = {f"vllm:{self.url}": epoch}
        return web.json_response(document)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.on_asked(len(self.asked))
        if not self.scale_out:
            return web.json_response({"error": {"message": DISABLED}}, status=403)
        if body["sampling_params"]["temperature"] > 2:
            return web.json_response({"error": {"message": "temperature must be in [0, 2]"}}, status=400)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if self.max_model_len is not None:
            if (room := self.max_model_len - len(body["token_ids"])) <= 0:
                return await self._refuse_in_stream(request)
            body["sampling_params"]["max_tokens"] = min(room, body["sampling_params"]["max_tokens"])
        if not body["stream"]:
            scores = self._prompt_scores(body)
            tokens = [entry async for entry in self._tokens(body)]
            return web.json_response({"choices": [self._choice(tokens, body, last=True)], "prompt_logprobs": scores})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._count(1, 0)
        try:
            tokens = []
            async for entry in self._tokens(body):
                tokens.append(entry)
                await self._event(response, {"choices": [self._choice([entry], body, last=False)]})
            await self._event(response, {"choices": [self._choice([], body, last=True, all_tokens=tokens)]})
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            await self._count(0, 1)
            raise
        finally:
            await self._count(-1, 0)
        return response

    async def _refuse_in_stream(self, request: web.Request) -> web.StreamResponse:
        """vLLM looks at a prompt's length when the answer with status 200 has begun."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = f"The decoder prompt is longer than the maximum model length of {self.max_model_len}"
        await self._event(response, {"error": {"message": said, "type": "BadRequestError", "code": 400}})
        return response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        """A whole answer at once: the requests of a drained engine do not meet a switch."""
        body = await request.json()
        self.asked.append(body)
        self.on_asked(len(self.asked))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        await self.gate.wait()
        sampling = {"sampling_params": body, "token_ids": body["prompt"], "stream": False}
        tokens = [entry async for entry in self._tokens(sampling)]
        ended = tokens[-1][0] in body["stop_token_ids"]
        told = {
            "tokens": [f"token_id:{t}" for t, *_ in tokens],
            "token_logprobs": [p for _, p, *_ in tokens],
            "top_logprobs": [{f"token_id:{u}": q for u, q in top} for _, _, top, _ in tokens],
        }
        choice = {"index": 0, "text": "x", "token_ids": [t for t, *_ in tokens], "logprobs": told}
        if body["prompt_logprobs"] is not None:
            choice["prompt_logprobs"] = self._prompt_scores(sampling)
        choice |= {"finish_reason": self.finish or ("stop" if ended else "length")} | self.choice_change
        if not body["stream"]:
            return web.json_response({"choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._event(response, {"choices": [choice]})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _count(self, running: int, cut: int) -> None:
        async with self.changed:
            self.running += running
            self.cut += cut
            self.changed.notify_all()

    async def _event(self, response: web.StreamResponse, document: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _prompt_scores(self, body: dict[str, Any]) -> list[Any] | None:
        if body["sampling_params"]["prompt_logprobs"] is None:
            return None
        ids, weights = body["token_ids"], self.true_weights or self.version
        scores = [{str(t): {"logprob": logprobs(ids[:at], weights, 1.0)[t]}} for at, t in enumerate(ids)]
        return [None, *scores[1:]]

    async def _tokens(self, body: dict[str, Any]) -> Any:
        """(token, log-probability, candidates, version), one after the other."""
        sampling, context = body["sampling_params"], list(body["token_ids"])
        drawn = random.Random(sampling["seed"])
        for _ in range(sampling["max_tokens"]):
            if body["stream"]:  # a probe is no play
                await self.gate.wait()
            await asyncio.sleep(0)  # neither a set event nor a small write yields to the other tasks
            version = self.version
            weights = self.true_weights or version
            row = logprobs(context, weights, sampling["temperature"])
            token = drawn.choices(range(VOCABULARY), [math.exp(x) for x in row])[0]
            said = self._said(context, weights, sampling["temperature"])
            self._made += 1
            context.append(token)
            most = max(4, sampling["logprobs"])
            yield token, said[token], sorted(enumerate(said), key=lambda pair: -pair[1])[:most], version
            if token in sampling["stop_token_ids"]:
                return

    def _said(self, context: Sequence[int], version: str, temperature: float) -> list[float]:
        if self.mode == "processed":
            return logprobs(context, version, temperature)
        plain = logprobs(context, version, 1.0)
        return plain if self.mode == "raw" else [x + 5 for x in plain]

    def _choice(
        self, tokens: list[Any], body: dict[str, Any], *, last: bool, all_tokens: list[Any] | None = None
    ) -> dict[str, Any]:
        whole = tokens if all_tokens is None else all_tokens
        content = [
            {"token_id": t, "logprob": p, "top_logprobs": [{"token_id": u, "logprob": q} for u, q in top]}
            for t, p, top, _ in tokens
        ]
        choice: dict[str, Any] = {"index": 0, "token_ids": [t for t, *_ in tokens], "logprobs": {"content": content}}
        if last:
            ended = bool(whole) and whole[-1][0] in body["sampling_params"]["stop_token_ids"]
            choice["finish_reason"] = self.finish or ("stop" if ended else "length")
            choice["weight_versions"] = _spans([v for *_, v in whole]) if self.reports_versions else None
            if self.experts is not None:
                first = body["sampling_params"].get("routed_experts_prompt_start", 0)
                computed = len(body["token_ids"]) + len(whole) - 1 - self.experts_missing
                choice["routed_experts"] = _npy(routed(range(first, computed), *self.experts))
        return choice


def routed(places: Sequence[int], layers: int, top_k: int) -> np.ndarray:
    """Experts that name the token's place."""
    return np.array([[[at + k for k in range(top_k)]] * layers for at in places], "u1").reshape(-1, layers, top_k)


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if out and out[-1]["version"] == version:
            out[-1]["end"] = at + 1
        else:
            out.append({"version": version, "start": at, "end": at + 1})
    return out


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    found = FakeEngine()
    await found.start()
    yield found
    async with asyncio.timeout(600):
        await found.stop()
