"""Requests to SGLang's generate, and answers that are not what it sends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from rollout_node.worker import sglang_form
from rollout_node.worker.sampled_answer import COLD, HOT, PromptRefusedError, logprobs_fault
from rollout_node.worker.sglang_form import PARTS, ROUTE, SglangAnswer, candidates, prompt_logprobs

STOP = 9


def named(label: str) -> Span:
    return Span(Version.parse(label), 0, 0, bytes(32), "keep")


def part(
    token_ids: list[int], made: int | None = None, finish: str | None = None, spans: Any = None, **meta: Any
) -> Any:
    """An answer, or a part of one. ``made``: the request's tokens so far. The log-probability of a token is -token."""
    told: dict[str, Any] = {
        "finish_reason": None if finish is None else {"type": finish},
        "completion_tokens": len(token_ids) if made is None else made,
        "output_token_logprobs": [[-float(token), token, None] for token in token_ids],
    }
    if spans is not None:
        told["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    return {"output_ids": token_ids, "meta_info": told | meta}


WHOLE = part([3, 4], finish="length", spans=[("0.1", 0, 2)])


def read(*parts: Any, most: int = 2, stop: tuple[int, ...] = (STOP,)) -> Any:
    answer = SglangAnswer(stop, most)
    for one in parts:
        answer.add(one)
    return answer.sample(named)


def test_a_whole_answer_is_a_sample() -> None:
    found = read(WHOLE)
    assert (found.token_ids, found.logprobs, found.stop) == ([3, 4], [-3.0, -4.0], "length")
    assert found.spans == [Span(Version(0, 1), 0, 2, bytes(32), "keep")]


def test_streams_with_all_tokens_and_with_new_tokens_are_equal() -> None:
    last = [("0.1", 0, 1), ("0.2", 1, 4)]
    all_tokens = [part([3]), part([3, 4, 5]), part([3, 4, 5, STOP], finish="stop", spans=last)]
    new_tokens = [part([3], 1), part([4, 5], 3), part([STOP], 4, "stop", last)]
    found = read(*all_tokens, most=8)
    assert found == read(*new_tokens, most=8)
    assert (found.token_ids, found.logprobs, found.stop) == ([3, 4, 5, STOP], [-3.0, -4.0, -5.0, -9.0], "end")
    assert [(span.version.step, span.start, span.end) for span in found.spans] == [(1, 0, 1), (2, 1, 4)]


def test_a_part_with_more_tokens_than_its_count_is_read() -> None:
    """SGLang writes a part's list of tokens when it sends it, and the count when the tokens came."""
    found = read(part([3, 4], 1), part([3, 4, 5], finish="length", spans=[("0.1", 0, 3)]), most=3)
    assert found.token_ids == [3, 4, 5]


def test_a_sample_goes_on_after_an_end_token_of_the_model() -> None:
    answer = SglangAnswer((STOP,), 8)
    answer.add(part([3, 7], finish="stop", spans=[("0.1", 0, 2)]))
    assert answer.proceed()
    answer.add(part([5]))
    answer.add(part([5, 6], 2, "stop", [("0.1", 0, 1), ("0.2", 1, 2)]))
    assert answer.proceed()
    answer.add(part([STOP], finish="stop", spans=[("0.3", 0, 1)]))
    assert not answer.proceed()
    found = answer.sample(named)
    assert (found.token_ids, found.stop) == ([3, 7, 5, 6, STOP], "end")
    assert [(s.version.step, s.start, s.end) for s in found.spans] == [(1, 0, 3), (2, 3, 4), (3, 4, 5)]


def test_a_sample_does_not_go_on_for_ever() -> None:
    answer = SglangAnswer((STOP,), 8)
    answer.add(part([7], finish="stop", spans=[("0.1", 0, 1)]))
    assert answer.proceed()
    answer.add(part([], finish="stop", spans=[("0.1", 0, 0)]))
    assert not answer.proceed()
    with pytest.raises(RemoteError):
        answer.sample(named)


@pytest.mark.parametrize(("token_ids", "stop"), [([3, STOP], (STOP,)), ([3, 7], ())])
def test_a_sample_that_ended_as_asked_does_not_go_on(token_ids: list[int], stop: tuple[int, ...]) -> None:
    answer = SglangAnswer(stop, 8)
    answer.add(part(token_ids, finish="stop", spans=[("0.1", 0, 2)]))
    assert not answer.proceed()


@pytest.mark.parametrize(
    "damaged",
    [
        WHOLE | {"output_ids": [3]},
        WHOLE | {"output_ids": None},
        WHOLE | {"output_ids": [3, 4.0]},
        part([], finish="length", spans=[("0.1", 0, 0)]),
        part([3, 4], 3, "length", [("0.1", 0, 2)]),
        part([3, 4], finish="length"),
        part([3, 4], spans=[("0.1", 0, 2)]),
        part([3, 4], finish="length", spans=[]),
        part([3, 4], finish="length", spans=[("0.1", 0, 1)]),
        part([3, 4], finish="length", spans=[("0.1", 1, 2)]),
        part([3, 4], finish="length", spans=[("0.1", 0, 3)]),
        part([3, 4], finish="length", spans=[("0.1", 0, "2")]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=None),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=[[-1.0, 3, None]]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=[[-1.0, 4, None], [-1.0, 3, None]]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=[[None, 3, None], [-1.0, 4, None]]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=[[-3e38, 3, None], [-1.0, 4, None]]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], output_token_logprobs=[[2.0, 3, None], [-1.0, 4, None]]),
        part([3, 4], finish="length", spans=[("0.1", 0, 2)], finish_reason="length"),
        part([3, 4, 5], finish="length", spans=[("0.1", 0, 3)]),
        part([3], finish="stop", spans=[("0.1", 0, 1)]),
    ],
)  # fmt: skip
def test_a_damaged_answer_is_refused(damaged: Any) -> None:
    with pytest.raises(P2PCastError):
        read(damaged)


@pytest.mark.parametrize("second", [part([5, 4]), part([4], 3), part([], 2)])
def test_a_stream_that_changes_or_leaves_out_tokens_is_refused(second: Any) -> None:
    with pytest.raises(RemoteError):
        read(part([3]), second, most=8)


def test_an_answer_without_versions_asks_for_a_newer_release() -> None:
    with pytest.raises(LocalError, match=r"SGLang 0\.5\.23 or newer"):
        read(part([3, 4], finish="length"))


@pytest.mark.parametrize(
    ("document", "kind", "why"),
    [
        ({"error": {"message": "too long", "code": 400}}, PromptRefusedError, "refused the request: too long"),
        ({"error": {"message": "down", "code": 503}}, RetryableError, "down"),
        ({"error": "down"}, RetryableError, "down"),
        (part([3], finish="abort"), RetryableError, "abort"),
        (part([3], finish_reason={"type": "abort", "message": "m", "status_code": 400}), PromptRefusedError, "refused"),
    ],
)
def test_failures_of_the_engine(document: Any, kind: type, why: str) -> None:
    with pytest.raises(P2PCastError, match=why) as caught:
        read(document)
    assert type(caught.value) is kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["output_ids", "meta_info", "finish_reason", "type", "completion_tokens", "output_token_logprobs",
                 "weight_versions", "version", "start", "end", "error", "message", "code", "input_token_logprobs",
                 "output_top_logprobs"]
            ),
            inner,
        )
    ),
    max_leaves=16,
)  # fmt: skip


@given(JSON)
def test_any_document_is_a_sample_or_one_of_our_errors(document: Any) -> None:
    with pytest.raises(P2PCastError):
        read(document)


@given(st.sampled_from(sorted(WHOLE["meta_info"])), JSON)
def test_any_value_of_a_field_is_a_sample_or_one_of_our_errors(field: str, value: Any) -> None:
    for reading in (read, candidates, lambda document: prompt_logprobs(document, [3, 4])):
        try:
            reading(WHOLE | {"meta_info": WHOLE["meta_info"] | {field: value}})
        except P2PCastError:
            pass


@given(JSON)
def test_any_document_is_scores_or_one_of_our_errors(document: Any) -> None:
    for reading in (candidates, lambda found: prompt_logprobs({"meta_info": found}, [3, 4])):
        try:
            reading(document)
        except P2PCastError:
            pass


def test_each_token_of_the_prompt_is_scored() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]]}}
    assert prompt_logprobs(answer, [4, 5, 6]).tolist() == [0.0, -1.0, -2.0]
    for other in ([4, 5], [4, 6, 5], [4, 5, 6, 7]):
        with pytest.raises(RemoteError):
            prompt_logprobs(answer, other)


def test_the_last_id_of_the_vocabulary_may_be_named_0() -> None:
    """SGLang 0.5.23 names it so in scores: logprob_result_processor.py, ``x < vocab_size - 1``."""
    answer = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 0, None], [-2.0, 5, None]]}}
    assert prompt_logprobs(answer, [4, 15, 5]).tolist() == [0.0, -1.0, -2.0]
    for other in ([15, 3, 5], [4, 15, 6]):
        with pytest.raises(RemoteError):
            prompt_logprobs(answer, other)


def probed(logprobs: dict[int, float | None]) -> dict[int, float]:
    rows = [[value, token, None] for token, value in logprobs.items()]
    return candidates({"meta_info": {"output_token_logprobs": rows[:1], "output_top_logprobs": [rows]}})


def test_probes_find_logprobs_of_temperature_1_and_name_sglangs_variable() -> None:
    right = logprobs_fault(probed({1: -0.02, 2: -4.02}), probed({1: -0.3, 2: -1.3, 3: None}), ROUTE)
    wrong = logprobs_fault(probed({1: -0.1, 2: -2.1}), probed({1: -0.1, 2: -2.1, 3: -3e38}), ROUTE)
    assert right is None
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in str(wrong)
    assert "vLLM" not in str(wrong)
    assert COLD < HOT


@pytest.mark.parametrize("seed", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_seeds_are_numbers_of_64_bits_with_a_sign(seed: int) -> None:
    sent = sglang_form.request([1], seed=seed, temperature=1.0, max_tokens=1, stop_token_ids=())
    found = sent["sampling_params"]["sampling_seed"]
    assert -(1 << 63) <= found < 1 << 63
    assert found % (1 << 64) == seed


@pytest.mark.parametrize(("tokens", "interval"), [(1, 1), (200, 3), (32768, 512)])
def test_a_sample_comes_in_few_parts(tokens: int, interval: int) -> None:
    sent = sglang_form.request([1], seed=0, temperature=1.0, max_tokens=tokens, stop_token_ids=())
    assert sent["sampling_params"]["stream_interval"] == interval
    assert tokens / interval <= 2 * PARTS


@pytest.mark.parametrize(("stop", "ignored"), [((), True), ((STOP,), False)])
def test_end_tokens_are_ignored_where_no_stop_token_is_asked_for(stop: tuple[int, ...], ignored: bool) -> None:
    """With ``ignore_eos`` SGLang ignores stop tokens too."""
    sent = sglang_form.request([1], seed=0, temperature=1.0, max_tokens=1, stop_token_ids=stop)
    assert sent["sampling_params"]["ignore_eos"] is ignored


def test_a_request_for_scores_samples_one_token_and_scores_the_prompt() -> None:
    body = sglang_form.score_request([4, 5], "0.3")
    assert (body["input_ids"], body["extra_key"], body["stream"]) == ([4, 5], "0.3", False)
    assert (body["logprob_start_len"], body["return_logprob"]) == (0, True)
    assert (body["sampling_params"]["max_new_tokens"], body["sampling_params"]["temperature"]) == (1, 1.0)
