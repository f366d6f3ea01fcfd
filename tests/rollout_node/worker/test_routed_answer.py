"""Experts in an answer of vLLM's generate: arrays of another form, and the tokens that the next request asks for."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import pytest

from p2pcast.ground.errors import RemoteError
from rollout_node.worker.generate_form import Answer, request
from rollout_node.worker.routed_answer import KnownTokens, routed_ids, routed_line_bytes


def npy(array: np.ndarray, **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
@pytest.mark.parametrize("shape", [(4, 3, 2), (24, 1, 1), (1, 1, 24), (0, 3, 2)])
def test_ids_equal_the_saved_array(dtype: str, shape: tuple[int, int, int]) -> None:
    ids = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    text = npy(ids)
    assert routed_ids(text).shape == shape
    assert (routed_ids(text) == ids).all()
    assert len(text) <= routed_line_bytes(shape[0], math.prod(shape[1:]) * ids.itemsize)
    assert routed_line_bytes(4, 0) == 0


def lying(shape: str) -> str:
    """A header that claims another shape."""
    content = base64.b64decode(npy(np.zeros((4, 3, 2), "u1")))
    header, ids = content[10:-24].replace(b"(4, 3, 2)", shape.encode()), content[-24:]
    return base64.b64encode(content[:8] + len(header).to_bytes(2, "little") + header + ids).decode()


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        base64.b64encode(b"not npy").decode(),
        npy(np.zeros((4, 3, 2), "<i8")),
        npy(np.zeros((4, 3, 2), ">u2")),
        npy(np.zeros((4, 3), "u1")),
        npy(np.asfortranarray(np.zeros((4, 3, 2), "u1"))),
        npy(np.zeros((4, 0, 2), "u1")),
        npy(np.array([[[{}]]], object), allow_pickle=True),
        lying("(5, 3, 2)"),
        lying("(4, 3, 9)"),
        lying("(-1, 3, 2)"),
        # numpy's reader ends with TokenError, SyntaxError, MemoryError and a warning here.
        lying("(((((((((" * 40),
        base64.b64encode(base64.b64decode(lying("(4, 3, 2)")).replace(b"|u1", b",u1")).decode(),
        lying("-" * 9000 + "1"),
        lying("(4L, 3L, 2L)"),
    ],
)
def test_an_array_of_another_form_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(RemoteError, match="not in the form of /inference/v1/generate"):
        Answer((), 1).add({"choices": [{"token_ids": [], "routed_experts": text}]})


def test_one_part_of_an_answer_has_the_experts() -> None:
    answer = Answer((), 9)
    answer.add({"choices": [{"token_ids": []}]})
    assert answer.experts is None
    answer.add({"choices": [{"token_ids": [], "routed_experts": npy(np.ones((1, 2, 1), "u1"))}]})
    answer.add({"choices": [{"token_ids": [], "routed_experts": None}]})
    assert answer.experts is not None


def test_a_request_asks_for_the_tokens_whose_experts_are_unknown() -> None:
    known = KnownTokens()
    assert known.first_unknown([1, 2, 3]) == 0
    known.received([1, 2, 3], [4, 5])
    assert known.first_unknown([1, 2, 3, 4, 5, 6]) == 4  # the last sampled token was not computed
    assert known.first_unknown([1, 2, 3, 4, 9]) == 4
    assert known.first_unknown([1, 2, 3]) == 0  # the same turn again
    assert known.first_unknown([1, 2, 9, 4, 5]) == 0  # another conversation of the play


def test_requests_without_known_tokens_are_as_before() -> None:
    options: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 4, "stop_token_ids": ()}
    assert "routed_experts_prompt_start" not in request([1, 2], **options)["sampling_params"]
    assert request([1, 2], **options, routed_from=1)["sampling_params"]["routed_experts_prompt_start"] == 1
