"""The completions sampler against a server that speaks OpenAI's completions, and a peer whose commits wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample
from rollout_node.worker import completions_sampler
from rollout_node.worker.completions_form import Completion, candidates
from rollout_node.worker.completions_sampler import ATTEMPTS, CompletionsSampler
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.sampled_answer import EngineFailedError, PromptRefusedError
from tests.support.fake_engine import FakeEngine, digest_of, logprobs


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def sampler(engine: FakeEngine, http: aiohttp.ClientSession) -> CompletionsSampler:
    engine.kv = "drain"
    return CompletionsSampler(http, engine.url, EngineVersions(http, engine.url, engine.url))


async def sampled(sampler: CompletionsSampler, count: int = 24, temperature: float = 1.0) -> Sample:
    return await sampler.sample([1, 2, 3], seed=5, temperature=temperature, max_tokens=count, stop_token_ids=())


async def test_a_sample_has_the_one_version_of_its_serving_epoch(
    engine: FakeEngine, sampler: CompletionsSampler
) -> None:
    found = await sampled(sampler)
    assert found.spans == [Span(Version(0, 1), 0, 24, bytes.fromhex(digest_of("0.1")), "drain")]
    for at in range(24):
        row = logprobs([1, 2, 3, *found.token_ids[:at]], "0.1", 1.0)
        assert found.logprobs[at] == row[found.token_ids[at]]


async def test_a_sample_whose_weights_changed_is_taken_again(engine: FakeEngine, sampler: CompletionsSampler) -> None:
    engine.versions, engine.tokens_a_version = ["0.1", "0.2"], 24
    found = await sampled(sampler)
    assert [(span.version, span.start, span.end) for span in found.spans] == [(Version(0, 2), 0, 24)]
    assert len(engine.asked) == 2


async def test_a_play_is_given_up_if_its_weights_change_every_time(
    engine: FakeEngine, sampler: CompletionsSampler
) -> None:
    engine.versions, engine.tokens_a_version = [f"0.{step}" for step in range(99)], 24
    with pytest.raises(RetryableError, match="the weights changed during each"):
        await sampled(sampler)
    assert len(engine.asked) == ATTEMPTS


async def test_no_request_is_sent_while_weights_are_written(engine: FakeEngine, sampler: CompletionsSampler) -> None:
    engine.writing = True
    asked: list[bool] = []
    engine.on_asked = lambda count: asked.append(engine.writing)
    engine.on_look = lambda count: setattr(engine, "writing", count < 3)
    await sampled(sampler)
    assert asked == [False]


async def test_an_answer_that_ends_under_a_write_is_taken_again(
    engine: FakeEngine, sampler: CompletionsSampler
) -> None:
    engine.on_asked = lambda count: setattr(engine, "writing", count == 1)
    engine.on_look = lambda count: setattr(engine, "writing", engine.writing and count < 4)
    await sampled(sampler)
    assert len(engine.asked) == 2


async def test_a_peer_whose_commits_do_not_wait_is_refused(engine: FakeEngine, sampler: CompletionsSampler) -> None:
    engine.kv = "recompute"
    for ask in (sampler.check, lambda: sampled(sampler)):
        with pytest.raises(LocalError, match="--commit-safe-point drain"):
            await ask()
    assert not engine.asked


async def test_every_field_that_shapes_the_distribution_is_sent(
    engine: FakeEngine, sampler: CompletionsSampler
) -> None:
    await sampled(sampler, temperature=0.7)
    sent = engine.asked[-1]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"], sent["n"]) == (0.7, 1.0, 0, 0.0, 1)
    assert (sent["presence_penalty"], sent["frequency_penalty"], sent["repetition_penalty"]) == (0.0, 0.0, 1.0)
    assert (sent["min_tokens"], sent["seed"], sent["ignore_eos"], sent["use_beam_search"]) == (0, 5, True, False)
    assert (sent["stop"], sent["bad_words"], sent["stop_token_ids"]) == ([], [], [])
    assert {sent[name] for name in ("logit_bias", "allowed_token_ids", "structured_outputs", "response_format")} == {
        None
    }


async def test_tokens_are_counted(sampler: CompletionsSampler) -> None:
    counts: list[int] = []
    await sampled(sampler.of_play(counts.append))
    assert sum(counts) == 24


async def test_a_stop_token_is_the_last_token_of_its_sample(sampler: CompletionsSampler) -> None:
    found = await sampler.sample([1], seed=3, temperature=1.0, max_tokens=200, stop_token_ids=[4, 5])
    assert (found.stop, found.token_ids[-1] in (4, 5)) == ("end", True)


# -- capabilities


async def test_a_fitting_engine_passes_the_check(sampler: CompletionsSampler) -> None:
    assert await sampler.check() == "0.1"


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"status": 404}, LocalError, "has no /v1/completions"),
        ({"status": 401}, LocalError, "--api-key"),
        ({"status": 500}, EngineFailedError, "answered 500"),
        ({"status": 400}, PromptRefusedError, "refused the request"),
        ({"choice_change": {"token_ids": None}}, LocalError, "returns no token ids"),
        ({"choice_change": {"logprobs": None}}, LocalError, "returns no log-probabilities"),
        ({"mode": "raw"}, LocalError, "--logprobs-mode processed_logprobs"),
        ({"mode": "logits"}, LocalError, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_a_missing_capability_has_one_clear_error(
    engine: FakeEngine, sampler: CompletionsSampler, change: dict[str, Any], kind: type, why: str
) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    with pytest.raises(P2PCastError, match=why) as caught:
        await sampler.check()
    assert type(caught.value) is kind


async def test_a_peer_that_names_no_serving_epoch_is_waited_for(
    engine: FakeEngine, sampler: CompletionsSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions_sampler, "WAITS", 0)
    engine.names_epochs = False
    with pytest.raises(RetryableError, match="changes its weights now"):
        await sampler.check()


# -- hostile answers


def whole(**change: Any) -> dict[str, Any]:
    told = {"tokens": ["token_id:3", "token_id:4"], "token_logprobs": [-0.5, -1.5], "top_logprobs": None}
    choice = {"index": 0, "text": "x", "token_ids": [3, 4], "logprobs": told, "finish_reason": "length"}
    return {"choices": [choice | change]}


def read(document: Any, most: int = 2) -> Sample:
    answer = Completion((9,), most)
    answer.add(document)
    return answer.sample_of(Span(Version(0, 1), 0, 0, bytes(32), "drain"))


def test_a_whole_answer_is_a_sample() -> None:
    found = read(whole())
    assert (found.token_ids, found.logprobs, found.stop) == ([3, 4], [-0.5, -1.5], "length")


TOLD = {"tokens": ["token_id:3", "token_id:4"], "token_logprobs": [-0.5, -1.5]}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [3]},
        {"token_ids": []},
        {"token_ids": None},
        {"token_ids": [4, 3]},
        {"token_ids": [3, 4, 5]},
        {"token_ids": "34"},
        {"logprobs": None},
        {"logprobs": {}},
        {"logprobs": TOLD | {"tokens": ["3", "4"]}},
        {"logprobs": TOLD | {"tokens": ["token_id:3"]}},
        {"logprobs": TOLD | {"token_logprobs": [-0.5]}},
        {"logprobs": TOLD | {"token_logprobs": [-0.5, None]}},
        {"logprobs": TOLD | {"token_logprobs": [-0.5, -9999.0]}},
        {"logprobs": TOLD | {"token_logprobs": [-0.5, float("nan")]}},
        {"logprobs": TOLD | {"token_logprobs": [-0.5, 2.0]}},
        {"finish_reason": None},
        {"finish_reason": "abort"},
    ],
)
def test_a_damaged_answer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(P2PCastError):
        read(whole(**change))


@pytest.mark.parametrize("most", [1, 3])
def test_too_many_tokens_or_too_early_an_end_are_refused(most: int) -> None:
    with pytest.raises(RemoteError):
        read(whole(), most)


KEYS = ["choices", "token_ids", "logprobs", "tokens", "token_logprobs", "top_logprobs", "text", "error"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(JSON)
def test_any_document_is_a_sample_or_one_of_our_errors(document: Any) -> None:
    for use in (read, candidates):
        with pytest.raises(P2PCastError):
            use(document)
