"""Answers that are not what vLLM's generate sends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from rollout_node.worker.generate_form import ROUTE, Answer
from rollout_node.worker.sampled_answer import COLD, FLAT, HOT, logprob, logprobs_fault


def named(label: str) -> Span:
    return Span(Version.parse(label), 0, 0, bytes(32), "keep")


def whole(**change: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": [3, 4],
        "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.5}]},
        "finish_reason": "length",
        "weight_versions": [{"version": "0.1", "start": 0, "end": 2}],
    }
    return {"choices": [choice | change]}


def read(document: Any, most: int = 2) -> Any:
    answer = Answer((9,), most)
    answer.add(document)
    return answer.sample(named)


def test_a_whole_answer_is_a_sample() -> None:
    found = read(whole())
    assert (found.token_ids, found.logprobs, found.stop) == ([3, 4], [-0.5, -1.5], "length")


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [3]},
        {"token_ids": []},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": {"content": None}},
        {"finish_reason": None},
        {"weight_versions": None},
        {"weight_versions": []},
        {"weight_versions": [{"version": "0.1", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "0.1", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "0.1", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "0.1", "start": 0, "end": 0}, {"version": "0.1", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "0.1"}]},
        {"logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -9999.0}]}},
        {"logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": float("nan")}]}},
        {"logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": 2.0}]}},
    ],
)
def test_a_damaged_answer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(P2PCastError):
        read(whole(**change))


@pytest.mark.parametrize("parts", [[], [whole(token_ids=[], finish_reason="abort", weight_versions=None)]])
def test_an_answer_that_ends_early_lacks_no_release_of_vllm(parts: list[Any]) -> None:
    answer = Answer((9,), 2)
    for part in parts:
        answer.add(part)
    for look in (answer.labels, lambda: answer.sample(named)):
        with pytest.raises(RetryableError, match="ended the request early"):
            look()


@pytest.mark.parametrize("most", [1, 3])
def test_too_many_tokens_or_too_early_an_end_are_refused(most: int) -> None:
    with pytest.raises(RemoteError):
        read(whole(), most)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "token_ids", "logprobs", "content", "weight_versions", "version", "error"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_document_is_a_sample_or_one_of_our_errors(document: Any) -> None:
    with pytest.raises(P2PCastError):
        read(document)


def test_a_rounded_logprob_is_at_most_0() -> None:
    assert logprob(1e-6, ROUTE) == 0.0


def at(temperature: float, logits: list[float], *, processed: bool = True) -> dict[int, float]:
    scaled = [logit / temperature if processed else logit for logit in logits]
    total = math.log(sum(map(math.exp, scaled)))
    return {token: logit - total for token, logit in enumerate(scaled)}


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=8))
def test_probes_tell_processed_logprobs_from_raw_logprobs(logits: list[float]) -> None:
    assert logprobs_fault(at(COLD, logits), at(HOT, logits), ROUTE) is None
    if max(logits) - min(logits) > 2 * FLAT:
        cold, hot = (at(temperature, logits, processed=False) for temperature in (COLD, HOT))
        assert logprobs_fault(cold, hot, ROUTE) is not None


def test_a_flat_distribution_raises_no_alarm() -> None:
    assert logprobs_fault({1: -1.0, 2: -1.0}, {1: -1.0, 2: -1.0}, ROUTE) is None
    assert logprobs_fault({1: -1.0}, {2: -1.0}, ROUTE) is None
