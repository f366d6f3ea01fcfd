"""Log-probabilities of a play from an engine's answer to its tokens, and what keeps them from being compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Result, Span
from p2pcast.sparse.budget_schedule import ALL_PAGES
from rollout_node.worker import recomputation

NEWEST, OLDER = Version(0, 3), Version(0, 2)


def result(*versions: Version, kv: str = "recompute", temperature: float = 1.0) -> Result:
    count = len(versions)
    return Result(
        job=bytes(16), lease=bytes(16), task_hash=bytes(32), token_ids=np.arange(count + 1, dtype="<u4"),
        mask=np.array([0] + [1] * count, "u1"), logprobs=np.array([0.0] + [-1.5] * count, "<f4"),
        spans=[Span(v, at + 1, at + 2, bytes(32), kv) for at, v in enumerate(versions)], temperature=temperature,
        reward=0.0, stop="end",
    )  # fmt: skip


def test_gaps_are_of_sampled_tokens_alone() -> None:
    found = recomputation.gaps(result(NEWEST, NEWEST), np.array([-9.0, -1.0, -1.75], "<f4"))
    assert found == (pytest.approx(0.375), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (result(NEWEST), None),
        (result(NEWEST, kv="drain"), None),
        (result(NEWEST, temperature=0.5), "temperature 0.5"),
        (result(OLDER, NEWEST), "several versions"),
        (result(NEWEST, kv="keep"), "cache"),
        (replace(result(NEWEST), schedules=[(NEWEST, bytes(32))]), "sparse attention"),
        (replace(result(NEWEST), schedules=[(NEWEST, ALL_PAGES.name())]), None),
        (replace(result(OLDER, NEWEST), schedules=[(OLDER, ALL_PAGES.name())]), "several versions"),
        (replace(result(NEWEST), schedules=[(OLDER, ALL_PAGES.name()), (NEWEST, bytes(32))]), "sparse attention"),
    ],
)
def test_obstacles(of: Result, reason: str | None) -> None:
    found = recomputation.obstacle(of)
    assert found is None if reason is None else reason in str(found)


def answer(**rows: Any) -> dict[str, Any]:
    return {"prompt_logprobs": [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}], **rows}


def test_each_token_of_the_prompt_is_scored() -> None:
    assert recomputation.prompt_logprobs(answer(), [4, 5, 6]).tolist() == [0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    "damaged",
    [
        {}, {"prompt_logprobs": None}, answer(prompt_logprobs=[None]), answer(prompt_logprobs=[None, None, None]),
        answer(prompt_logprobs=[None, {"7": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}]),
        answer(prompt_logprobs=[None, {"5": {"logprob": "x"}}, {"6": {"logprob": -2.0}}]), [], None, 5,
    ],
)  # fmt: skip
def test_a_damaged_answer_is_refused(damaged: Any) -> None:
    with pytest.raises(RemoteError):
        recomputation.prompt_logprobs(damaged, [4, 5, 6])


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["5", "6", "logprob"]), inner),
    max_leaves=10,
)


@given(JSON)
def test_any_document_is_scores_or_one_of_our_errors(document: Any) -> None:
    try:
        found = recomputation.prompt_logprobs({"prompt_logprobs": document}, [4, 5, 6])
    except P2PCastError:
        return
    assert np.isfinite(found).all()


def test_a_request_samples_one_token_and_scores_the_prompt() -> None:
    body = recomputation.request([4, 5], "0.3")
    assert body["token_ids"] == [4, 5]
    assert body["cache_salt"] == "0.3"
    assert not body["stream"]
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["prompt_logprobs"], sampling["temperature"]) == (1, 0, 1.0)
