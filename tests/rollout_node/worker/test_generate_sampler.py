"""The sampler against a server that speaks vLLM's generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from scripted_sampler import jobs_of

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import fault
from p2pcast.tasks.play import Play, result_of
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Sample
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler, TopTokenShare
from rollout_node.worker.sampled_answer import EngineFailedError, PromptRefusedError
from tests.support.fake_engine import FakeEngine, digest_of, logprobs, routed


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def sampler(engine: FakeEngine, http: aiohttp.ClientSession) -> GenerateSampler:
    return GenerateSampler(http, engine.url, EngineVersions(http, engine.url, engine.url))


async def sampled(sampler: GenerateSampler, count: int = 24, seed: int = 5, temperature: float = 1.0) -> Sample:
    return await sampler.sample([1, 2, 3], seed=seed, temperature=temperature, max_tokens=count, stop_token_ids=())


async def test_a_sample_has_the_engines_tokens_logprobs_and_spans(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.versions, engine.tokens_a_version = ["0.1", "0.2", "0.3"], 10
    found = await sampled(sampler)
    assert [(s.version, s.start, s.end) for s in found.spans] == [
        (Version(0, 1), 0, 10),
        (Version(0, 2), 10, 20),
        (Version(0, 3), 20, 24),
    ]
    assert [s.manifest.hex() for s in found.spans] == [digest_of(f"0.{step}") for step in (1, 2, 3)]
    assert {s.kv for s in found.spans} == {"recompute"}
    for span in found.spans:
        for at in range(span.start, span.end):
            row = logprobs([1, 2, 3, *found.token_ids[:at]], str(span.version), 1.0)
            assert found.logprobs[at] == row[found.token_ids[at]]


async def test_every_field_that_shapes_the_distribution_is_sent(engine: FakeEngine, sampler: GenerateSampler) -> None:
    await sampled(sampler, temperature=0.7)
    sent = engine.asked[-1]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"], sent["n"]) == (0.7, 1.0, 0, 0.0, 1)
    assert (sent["presence_penalty"], sent["frequency_penalty"], sent["repetition_penalty"]) == (0.0, 0.0, 1.0)
    assert (sent["min_tokens"], sent["seed"], sent["ignore_eos"]) == (0, 5, True)
    assert {sent[name] for name in ("stop", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs")} == {
        None
    }
    assert "cache_salt" not in engine.asked[-1]


async def test_the_policy_salt_sends_the_served_version(engine: FakeEngine, http: aiohttp.ClientSession) -> None:
    engine.kv = "salt"
    versions = EngineVersions(http, engine.url, engine.url)
    await versions.refresh()
    found = await sampled(GenerateSampler(http, engine.url, versions))
    assert engine.asked[-1]["cache_salt"] == "0.1"
    assert found.spans[0].kv == "salt"


async def test_equal_seeds_give_equal_samples(sampler: GenerateSampler) -> None:
    assert await sampled(sampler) == await sampled(sampler)
    assert await sampled(sampler) != await sampled(sampler, seed=6)


async def test_a_stop_token_is_the_last_token_of_its_sample(sampler: GenerateSampler) -> None:
    found = await sampler.sample([1], seed=3, temperature=1.0, max_tokens=200, stop_token_ids=[4, 5])
    assert found.stop == "end"
    assert found.token_ids[-1] in (4, 5)
    assert not {4, 5} & set(found.token_ids[:-1])


async def test_a_play_of_sums_is_a_result_without_fault(sampler: GenerateSampler) -> None:
    task = Sums()
    for job in jobs_of(task, 20):
        played = await task.play(sampler, job)
        result = result_of(job, bytes(16), played, task.reward(job, played.token_ids, played.mask))
        assert fault(result, task.vocabulary) is None


async def test_tokens_are_counted_as_the_engine_streams(engine: FakeEngine, sampler: GenerateSampler) -> None:
    counts: list[int] = []
    await sampled(sampler.of_play(counts.append))
    assert sum(counts) == 24
    assert len(counts) > 1


async def test_a_cancelled_sample_ends_at_the_engine(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.gate.clear()
    asked = asyncio.ensure_future(sampled(sampler))
    await engine.until_running(1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await engine.until_cut(1)


# -- capabilities


async def test_a_fitting_engine_passes_the_check(sampler: GenerateSampler) -> None:
    assert await sampler.check() == "0.1"


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"scale_out": False}, LocalError, "--enable-scale-out"),
        ({"status": 404}, LocalError, "vLLM 0.32 or newer"),
        ({"status": 401}, LocalError, "--api-key"),
        ({"status": 500}, EngineFailedError, "answered 500"),
        ({"status": 400}, PromptRefusedError, "refused the request"),
        ({"reports_versions": False}, LocalError, "which weights made its tokens"),
        ({"mode": "raw"}, LocalError, "--logprobs-mode processed_logprobs"),
        ({"mode": "logits"}, LocalError, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_a_missing_capability_has_one_clear_error(
    engine: FakeEngine, sampler: GenerateSampler, change: dict[str, object], kind: type, why: str
) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    with pytest.raises(P2PCastError, match=why) as caught:
        await sampler.check()
    assert type(caught.value) is kind


async def test_an_engine_that_is_away_can_be_tried_again(engine: FakeEngine, sampler: GenerateSampler) -> None:
    await engine.stop()
    with pytest.raises(RetryableError, match="does not answer"):
        await sampler.check()
    await engine.start()


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_a_sample_that_the_engine_aborted_is_no_sample(
    engine: FakeEngine, sampler: GenerateSampler, finish: str
) -> None:
    engine.finish = finish
    with pytest.raises(RetryableError, match=finish):
        await sampled(sampler)


async def test_weights_that_no_peer_installed_are_refused(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.versions = ["none"]
    with pytest.raises(RetryableError, match="no peer installed"):
        await sampled(sampler)


async def test_a_version_that_the_peer_forgot_keeps_its_hash(engine: FakeEngine, http: aiohttp.ClientSession) -> None:
    versions = EngineVersions(http, engine.url, engine.url)
    await versions.refresh()
    engine.versions = ["0.9"]
    assert (await versions.refresh()).version == Version(0, 9)
    assert (await versions.span("0.1")).manifest.hex() == digest_of("0.1")


async def test_turns_of_a_play_ask_for_experts_once(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.experts = (3, 2)
    await sampler.check()
    assert sampler.routed_bytes == 6
    play, own = Play([1, 2, 3]), sampler.of_play(lambda count: None)
    (job,) = jobs_of(Sums(), 1)
    for _ in range(3):
        await play.turn(own, replace(job, max_tokens=99), 4, ())
        play.add_environment([5, 6])
    asked = [body["sampling_params"].get("routed_experts_prompt_start") for body in engine.asked[-3:]]
    assert asked == [None, 6, 12]
    found = play.end("length").routed_experts
    assert found is not None
    assert found.spans == ((0, 18),)
    assert (found.array() == routed(range(18), 3, 2)).all()


async def test_experts_of_another_number_of_tokens_are_left_out(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.experts, engine.experts_missing = (3, 2), 1
    assert (await sampled(sampler)).experts is None


async def test_experts_longer_than_a_plain_line_are_read(engine: FakeEngine, sampler: GenerateSampler) -> None:
    """Of 60 tokens with 48 KiB each: 4 MiB in base64."""
    engine.experts = (1000, 48)
    await sampler.check()
    found = (await sampled(sampler.of_play(lambda count: None), count=58)).experts
    assert found is not None
    assert found.ids.shape == (60, 1000, 48)


async def test_an_engine_restarted_with_the_option_costs_one_sample(
    engine: FakeEngine, sampler: GenerateSampler
) -> None:
    await sampler.check()
    engine.experts = (1000, 48)
    with pytest.raises(RemoteError, match="sent a line of more than"):
        await sampled(sampler.of_play(lambda count: None), count=58)
    assert (await sampled(sampler.of_play(lambda count: None), count=58)).experts is not None


async def test_scores_ask_for_no_experts(engine: FakeEngine, sampler: GenerateSampler) -> None:
    engine.experts = (1000, 48)
    scores, _ = await sampler.score(list(range(1, 15)) * 20)
    assert len(scores) == 280


async def test_a_share_of_sparse_plays_has_the_most_probable_tokens(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    engine.schedules = {"0.1": "ab" * 32}
    versions = EngineVersions(http, engine.url, engine.url)
    await versions.refresh()
    sampler = GenerateSampler(http, engine.url, versions)
    assert (await sampled(sampler.of_play(lambda count: None))).top is None
    sampler = GenerateSampler(http, engine.url, versions, top=TopTokenShare(1.0, 6))
    found = await sampled(sampler.of_play(lambda count: None))
    assert found.top is not None
    for at, (ids, values) in enumerate(zip(*found.top, strict=True)):
        row = np.array(logprobs([1, 2, 3, *found.token_ids[:at]], "0.1", 1.0))
        assert ids.tolist() == np.argsort(-row, kind="stable")[:6].tolist()
        assert np.allclose(values, row[ids])


async def test_a_dense_engine_is_not_asked_for_the_most_probable_tokens(
    engine: FakeEngine, http: aiohttp.ClientSession
) -> None:
    sampler = GenerateSampler(
        http, engine.url, EngineVersions(http, engine.url, engine.url), top=TopTokenShare(share=1.0)
    )
    assert (await sampled(sampler.of_play(lambda count: None))).top is None
    assert engine.asked[-1]["sampling_params"]["logprobs"] == 0


async def test_a_sample_with_too_few_top_tokens_goes_without(engine: FakeEngine, http: aiohttp.ClientSession) -> None:
    engine.schedules = {"0.1": "ab" * 32}
    versions = EngineVersions(http, engine.url, engine.url)
    await versions.refresh()
    sampler = GenerateSampler(http, engine.url, versions, top=TopTokenShare(1.0, 10_000))
    found = await sampled(sampler.of_play(lambda count: None))
    assert (found.top, len(found.token_ids)) == (None, 24)
