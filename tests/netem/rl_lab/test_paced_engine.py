"""The paced engine, through the sampler that `p2pcast work` uses: tokens, versions, installations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from transformers import Qwen3ForCausalLM

from netem.fleet.small_model import make_small_model
from netem.rl_lab.paced_engine import PacedEngine
from netem.rollouts.graded_answers import VOCABULARY
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample
from rollout_node.worker.generate_sampler import GenerateSampler

FAST = 1e6


class Naming:
    salt = None

    async def span(self, label: str) -> Span:
        return Span(Version.parse(label), 0, 0, bytes(32), "recompute")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_small_model(folder / str(seed), VOCABULARY, hidden=64, layers=1, seed=seed) for seed in (0, 1)]


@asynccontextmanager
async def served(engine: PacedEngine) -> AsyncIterator[tuple[GenerateSampler, str, aiohttp.ClientSession]]:
    app = web.Application()
    app.router.add_routes(engine.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as http:
            yield GenerateSampler(http, url, Naming()), url, http
    finally:
        await runner.cleanup()


async def sampled(sampler: GenerateSampler, prompt: list[int], tokens: int = 12) -> Sample:
    return await sampler.sample(prompt, seed=0, temperature=1.0, max_tokens=tokens, stop_token_ids=())


async def test_samples_are_of_the_installed_weights_and_name_their_version(models: list[Path]) -> None:
    engine = PacedEngine(Qwen3ForCausalLM.from_pretrained(models[0]).float().eval(), FAST)
    async with served(engine) as (sampler, url, http):
        for number, model in enumerate(models):
            query = {"version": f"1.{number}", "folder": str(model)}
            async with http.post(f"{url}/install", params=query) as done:
                assert done.status == 200
            assert await sampler.check() == f"1.{number}"
            samples = await asyncio.gather(*(sampled(sampler, [n, 7, 9]) for n in range(5)))
            rival = Qwen3ForCausalLM.from_pretrained(model).float().eval()
            for first, sample in enumerate(samples):
                assert [(s.version, s.start, s.end) for s in sample.spans] == [(Version(1, number), 0, 12)]
                whole = torch.tensor([[first, 7, 9, *sample.token_ids]])
                scores = torch.log_softmax(rival(input_ids=whole).logits[0].float(), -1).detach()
                true = [float(scores[2 + at, token]) for at, token in enumerate(sample.token_ids)]
                assert sample.logprobs == pytest.approx(true, abs=1e-4)


async def test_an_answer_takes_the_time_of_its_tokens(models: list[Path]) -> None:
    engine = PacedEngine(Qwen3ForCausalLM.from_pretrained(models[0]).float().eval(), 50.0)
    engine.install(Version(1, 0), models[0])
    parts: list[int] = []
    async with served(engine) as (sampler, _, _):
        began_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(sampled(sampler.of_play(parts.append), [n], 40) for n in range(3)))
        took_s = asyncio.get_running_loop().time() - began_s
    assert took_s > 40 / 50.0 - 0.01, "no answer is faster than its pace"
    assert sum(parts) == 3 * 40
    assert len(parts) > 3, "tokens come in parts"


async def test_a_failed_sample_fails_its_request_alone(models: list[Path]) -> None:
    engine = PacedEngine(Qwen3ForCausalLM.from_pretrained(models[0]).float().eval(), FAST)
    engine.install(Version(1, 0), models[0])
    async with served(engine) as (sampler, _, _):
        with pytest.raises(RetryableError, match="500"):
            await sampled(sampler, [VOCABULARY + 7])
        assert len((await sampled(sampler, [3])).token_ids) == 12
