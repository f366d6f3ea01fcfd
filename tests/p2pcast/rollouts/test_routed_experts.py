"""Experts of tokens: packing, alignment over turns, and hostile values of the right form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import MAX_RESULT_BYTES, Result, Span, fault, routed_room
from p2pcast.rollouts.routed_experts import (
    ExpertShape,
    RoutedExperts,
    RoutedTokens,
    routed_fault,
    shape_fault,
)
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import Sample, SampledExperts

SHAPE = ExpertShape(layers=3, top_k=2, experts=8)


def drawn(tokens: int, shape: ExpertShape = SHAPE, seed: int = 0) -> np.ndarray:
    """Distinct experts in the order of a router, which does not ascend."""
    rng = np.random.default_rng(seed)
    order = rng.random((tokens, shape.layers, shape.experts)).argsort(-1)[..., : shape.top_k]
    return order.astype("u1" if shape.experts <= 256 else "u2")


def packed(*parts: tuple[int, np.ndarray]) -> RoutedExperts:
    collected = RoutedTokens()
    for start, ids in parts:
        collected.add(start, ids)
    found = collected.packed(MAX_RESULT_BYTES)
    assert found is not None
    return found


def result(routed: RoutedExperts | None, tokens: int = 4) -> Result:
    return Result(
        job=bytes(16),
        lease=bytes(16),
        task_hash=bytes(32),
        token_ids=np.arange(tokens, dtype="<u4"),
        mask=np.ones(tokens, "u1"),
        logprobs=np.full(tokens, -1, "<f4"),
        spans=(Span(Version(0, 1), 0, tokens, bytes(32), "keep"),),
        temperature=1.0,
        reward=0.0,
        stop="end",
        routed_experts=routed,
    )


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.sampled_from([8, 256, 257, 512]), st.integers(0, 99))
def test_experts_round_trip_as_ascending_sets(tokens: int, layers: int, top_k: int, experts: int, seed: int) -> None:
    shape = ExpertShape(layers, min(top_k, experts), experts)
    ids = drawn(tokens, shape, seed)
    read = Result.from_bytes(result(packed((0, ids)), tokens + 1).to_bytes())
    routed = read.routed_experts
    assert routed is not None
    assert routed.width == (1 if experts <= 256 else 2)
    assert (routed.array() == np.sort(ids, -1)).all()
    assert routed.places().tolist() == list(range(tokens))
    assert fault(read, 16) is None
    assert shape_fault(routed, shape) is None


def test_a_result_without_experts_has_no_key_and_is_read_as_before() -> None:
    assert b"routed_experts" not in result(None).to_map()
    assert Result.from_map(result(None).to_map()).routed_experts is None


def test_each_token_keeps_the_experts_of_the_first_request_with_its_row() -> None:
    first, second = drawn(4, seed=1), drawn(9, seed=2)
    routed = packed((0, first), (0, second))
    assert routed.spans == ((0, 9),)
    assert (routed.array() == np.sort(np.concatenate([first, second[4:]]), -1)).all()
    assert packed((0, first), (4, second[4:])) == routed


def test_tokens_that_no_request_returned_have_no_experts() -> None:
    routed = packed((2, drawn(3)), (7, drawn(2)))
    assert routed.spans == ((2, 5), (7, 9))
    assert routed.places().tolist() == [2, 3, 4, 7, 8]
    assert routed_fault(routed, 9) is None


def test_experts_since_a_token_are_the_rest() -> None:
    ids = drawn(5)
    routed = packed((2, ids[:3]), (7, ids[3:]))
    assert routed.since(0) == routed
    later = routed.since(4)
    assert later is not None
    assert later.spans == ((4, 5), (7, 9))
    assert (later.array() == np.sort(ids[2:], -1)).all()
    assert routed.since(6) == packed((7, ids[3:]))
    assert routed.since(9) is None


def test_rows_of_another_model_are_left_out() -> None:
    routed = packed((0, drawn(3)), (3, drawn(2, ExpertShape(4, 2, 8))), (3, drawn(2, ExpertShape(3, 2, 300))))
    assert routed.spans == ((0, 3),)


def test_turns_of_a_play_have_the_experts_of_their_own_requests() -> None:
    """Prompt of 3 tokens, 2 sampled, 2 of the environment, 3 sampled: the last token is never computed."""
    play, turns = Play([1, 2, 3]), [drawn(4, seed=1), drawn(5, seed=2)]
    play.add_turn(Sample([4, 5], [-1.0, -1.0], (), "length", SampledExperts(0, turns[0])))
    play.add_environment([6, 7])
    play.add_turn(Sample([8, 9, 10], [-1.0] * 3, (), "length", SampledExperts(4, turns[1])))
    routed = play.end("length").routed_experts
    assert routed is not None
    assert routed.spans == ((0, 9),)
    assert (routed.array() == np.sort(np.concatenate(turns), -1)).all()


def test_a_turn_without_experts_leaves_its_tokens_out() -> None:
    play = Play([1, 2, 3])
    play.add_turn(Sample([4, 5], [-1.0, -1.0], (), "length", SampledExperts(0, drawn(4))))
    play.add_environment([6])
    play.add_turn(Sample([7], [-1.0], (), "length"))
    play.add_environment([8])
    play.add_turn(Sample([9, 3], [-1.0] * 2, (), "length", SampledExperts(6, drawn(3))))
    routed = play.end("length").routed_experts
    assert routed is not None
    assert routed.spans == ((0, 4), (6, 9))


LARGE = ExpertShape(layers=48, top_k=8, experts=128)


def test_32768_tokens_of_a_large_model_fit_and_more_go_without() -> None:
    tokens = 32_768
    collected = RoutedTokens()
    collected.add(0, drawn(64, LARGE).repeat(tokens // 64, axis=0))
    routed = collected.packed(routed_room(tokens))
    assert routed is not None
    assert len(routed.ids) == 12 << 20
    made = result(routed, tokens)
    assert len(made.to_map()) < MAX_RESULT_BYTES
    assert Result.from_bytes(made.to_bytes()) == made
    assert collected.packed(routed_room(1 << 19)) is None


def test_compressed_size_of_evenly_spread_experts() -> None:
    """The worst case for zstd. A set of 8 of 128 has 40 bits of information, and 64 bits of ids."""
    routed = packed((0, drawn(512, LARGE)))
    share = len(zstandard.ZstdCompressor(level=1).compress(routed.ids)) / len(routed.ids)
    print(f"{share:.2f} of {LARGE.layers * LARGE.top_k} bytes a token")
    assert share < 0.9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": bytes(5)}, "5 bytes of experts"),
        ({"width": 2}, "18 bytes of experts"),
        ({"layers": 4}, "18 bytes of experts"),
        ({"spans": ((0, 2),)}, "18 bytes of experts"),
        ({"spans": ((1, 1), (1, 4))}, "empty, out of order"),
        ({"spans": ((1, 3), (2, 3))}, "empty, out of order"),
        ({"spans": ((3, 6),)}, "beyond the last token"),
        ({"ids": bytes([1, 1] * 9)}, "repeated, or do not ascend"),
        ({"ids": bytes([5, 1] * 9)}, "repeated, or do not ascend"),
        ({"ids": bytes([0, 1] * 8 + [0, 0])}, "repeated, or do not ascend"),
    ],
)
def test_hostile_experts_of_the_right_form_are_a_fault(change: dict[str, Any], says: str) -> None:
    good = RoutedExperts(3, 2, 1, ((0, 3),), bytes([1, 5] * 9))
    assert fault(result(good), 16) is None
    read = Result.from_bytes(result(good._replace(**change)).to_bytes())
    assert says in str(fault(read, 16))


@pytest.mark.parametrize(
    "change", [{"layers": 0}, {"top_k": 0}, {"layers": 1 << 40}, {"width": 4}, {"spans": ((-1, 3),)}, {"ids": "text"}]
)
def test_experts_of_another_form_are_no_record(change: dict[str, Any]) -> None:
    good = RoutedExperts(3, 2, 1, ((0, 3),), bytes([1, 5] * 9))
    with pytest.raises(RemoteError, match="'routed_experts' is malformed"):
        Result.from_bytes(result(good._replace(**change)).to_bytes())


def test_a_layer_without_experts_has_only_zeros() -> None:
    """vLLM returns a row for each layer, dense ones included."""
    ids = np.zeros((2, 3, 2), "u1")
    ids[:, 1:] = [2, 7]
    assert routed_fault(packed((0, ids)), 3) is None


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (ExpertShape(4, 2, 8), "3 layers with 2 experts a token, and the model has 4 layers"),
        (ExpertShape(3, 4, 8), "with 2 experts a token, and the model has 3 layers with 4 of 8"),
        (ExpertShape(3, 2, 7), "an expert 7, and the model has"),
    ],
)
def test_experts_of_another_model_are_told_apart(shape: ExpertShape, says: str) -> None:
    ids = np.array([[[0, 1], [2, 3], [6, 7]]], "u1")
    assert shape_fault(packed((0, ids)), SHAPE) is None
    assert says in str(shape_fault(packed((0, ids)), shape))


def test_a_shape_is_read_from_text() -> None:
    assert ExpertShape.parse("48,8,128") == ExpertShape(48, 8, 128)


@pytest.mark.parametrize("text", ["", "48,8", "48,8,128,1", "0,8,128", "48,x,128", "48,-8,128", "48,9,8", "48,8,99999"])
def test_text_of_no_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is no shape of experts"):
        ExpertShape.parse(text)
