"""The sampler against a server that speaks SGLang's generate."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.worker import engine_requests
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.sampled_answer import PromptRefusedError
from rollout_node.worker.sglang_sampler import SglangSampler
from tests.support.fake_engine import FakeEngine, digest_of

LOGITS = [0.0, 1.0, 2.0, 3.0]
STOP, END = 3, 2
"""A stop token of requests, and an end token of the model."""


class Engine:
    """Says ``script``, one list of tokens after the other. ``original``: log-probabilities without the temperature.
    ``asked``: bodies.
    """

    def __init__(self) -> None:
        self.script: list[list[int]] = [[1]]
        self.original, self.status, self.labelled, self.padding = False, 200, True, 0
        self.asked: list[dict[str, Any]] = []

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/versions", self._versions)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _versions(self, request: web.Request) -> web.Response:
        engines = {"safetensors:out": "0.9", f"sglang:{self.url}": "0.1", "vllm:http://other:1": "0.8"}
        manifests = {version: digest_of(version) for version in ("0.1", "0.8", "0.9")}
        return web.json_response(
            {"node": "e0" * 16, "kv": "salt", "staged": None, "engines": engines, "manifests": manifests}
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        said = self.script[min(len(self.asked), len(self.script)) - 1]
        scale = 1.0 if self.original else body["sampling_params"]["temperature"]
        total = math.log(sum(math.exp(logit / scale) for logit in LOGITS))
        rows = [[logit / scale - total, token, None] for token, logit in enumerate(LOGITS)]
        ended = said[-1] in (STOP, END) and not body["sampling_params"]["ignore_eos"]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop" if ended else "length"},
            "completion_tokens": len(said),
            "output_token_logprobs": [rows[token] for token in said],
            "output_top_logprobs": [rows],
            "input_token_logprobs": [[None if not at else -1.0, t, None] for at, t in enumerate(body["input_ids"])],
            "padding": "-" * self.padding,
        }
        if self.labelled:
            meta["weight_versions"] = [{"version": "0.1", "start": 0, "end": len(said)}]
        text = json.dumps({"output_ids": said, "meta_info": meta})
        return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n" if body["stream"] else text)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    found = Engine()
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def sampler(engine: Engine) -> AsyncIterator[SglangSampler]:
    async with aiohttp.ClientSession() as http:
        versions = EngineVersions(http, engine.url, engine.url)
        served = await versions.refresh()
        assert (served.version, served.engine) == (Version(0, 1), f"sglang:{engine.url}")
        yield SglangSampler(http, engine.url, versions)


async def test_a_sample_goes_on_after_the_models_end_token(engine: Engine, sampler: SglangSampler) -> None:
    engine.script = [[1, END], [0, 1, STOP]]
    counts: list[int] = []
    found = await sampler.of_play(counts.append).sample(
        [0, 1], seed=1 << 63, temperature=1.0, max_tokens=8, stop_token_ids=[STOP]
    )
    assert (found.token_ids, found.stop) == ([1, END, 0, 1, STOP], "end")
    assert [(span.version, span.start, span.end, span.kv) for span in found.spans] == [(Version(0, 1), 0, 5, "salt")]
    assert sum(counts) == 5
    assert [body["input_ids"] for body in engine.asked] == [[0, 1], [0, 1, 1, END]]
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.asked] == [8, 6]
    assert {body["extra_key"] for body in engine.asked} == {"0.1"}


async def test_every_field_that_shapes_the_distribution_is_sent(engine: Engine, sampler: SglangSampler) -> None:
    await sampler.sample([0], seed=5, temperature=0.7, max_tokens=1, stop_token_ids=())
    sent = engine.asked[-1]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"], sent["n"]) == (0.7, 1.0, -1, 0.0, 1)
    assert (sent["presence_penalty"], sent["frequency_penalty"], sent["repetition_penalty"]) == (0.0, 0.0, 1.0)
    assert (sent["min_new_tokens"], sent["sampling_seed"], sent["ignore_eos"]) == (0, 5, True)
    assert sent["watermark"] == {"enabled": False}
    neutral = ("stop", "stop_regex", "logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")
    assert {sent[name] for name in neutral} == {None}


async def test_a_score_names_its_version(sampler: SglangSampler) -> None:
    scores, version = await sampler.score([0, 1, 2])
    assert (scores.tolist(), version) == ([0.0, -1.0, -1.0], Version(0, 1))


async def test_a_fitting_engine_passes_the_check(sampler: SglangSampler) -> None:
    assert await sampler.check() == "0.1"


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"original": True}, LocalError, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"labelled": False}, LocalError, r"SGLang 0\.5\.23 or newer"),
        ({"status": 404}, LocalError, r"no /generate: SGLang 0\.5\.23 or newer"),
        ({"status": 401}, LocalError, "--api-key"),
        ({"status": 400}, PromptRefusedError, "refused the request"),
        ({"status": 503}, RetryableError, "answered 503"),
    ],
)
async def test_a_missing_capability_has_one_clear_error(
    engine: Engine, sampler: SglangSampler, change: dict[str, object], kind: type, why: str
) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    with pytest.raises(P2PCastError, match=why) as caught:
        await sampler.check()
    assert type(caught.value) is kind
    assert "vLLM" not in str(caught.value)


async def test_a_line_far_longer_than_its_tokens_is_refused(
    engine: Engine, sampler: SglangSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_requests, "MAX_LINE_BYTES", 1 << 12)
    engine.script, engine.padding = [[1] * 200], 16000
    found = await sampler.sample([0], seed=5, temperature=1.0, max_tokens=200, stop_token_ids=())
    assert len(found.token_ids) == 200
    engine.padding = 64000
    with pytest.raises(RemoteError, match="a line of more than 33792 bytes"):
        await sampler.sample([0], seed=5, temperature=1.0, max_tokens=200, stop_token_ids=())


async def test_another_engine_has_no_such_route() -> None:
    other = FakeEngine()
    await other.start()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(LocalError, match=r"SGLang 0\.5\.23 or newer is needed"):
            await SglangSampler(http, other.url, EngineVersions(http, other.url, other.url)).check()
    await other.stop()
