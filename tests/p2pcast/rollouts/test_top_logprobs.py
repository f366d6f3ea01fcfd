"""Top log-probabilities: packing, bytes of a record, and hostile values of the right form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Result, Span, fault
from p2pcast.rollouts.top_logprobs import MAX_TOP_BYTES, TopLogprobs, TopTokens
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import Sample, SampledTop

VOCABULARY = 50


def drawn(tokens: int, count: int = 4, seed: int = 0) -> SampledTop:
    """The most probable tokens first, as an engine sends them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, VOCABULARY)) * 3
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :count]
    return SampledTop(ids.astype(np.uint32), np.take_along_axis(logprobs, ids, -1).astype(np.float32))


def packed(*parts: tuple[int, SampledTop]) -> TopLogprobs:
    collected = TopTokens()
    for start, top in parts:
        collected.add(start, *top)
    found = collected.packed()
    assert found is not None
    return found


def result(top: TopLogprobs | None, tokens: int = 6) -> Result:
    mask = np.ones(tokens, "u1")
    mask[:2] = 0
    return Result(
        job=bytes(16),
        lease=bytes(16),
        task_hash=bytes(32),
        token_ids=np.arange(tokens, dtype="<u4"),
        mask=mask,
        logprobs=np.where(mask, -1, 0).astype("<f4"),
        spans=(Span(Version(0, 1), 2, tokens, bytes(32), "keep"),),
        temperature=1.0,
        reward=0.0,
        stop="end",
        top_logprobs=top,
    )


def test_a_record_keeps_tokens_in_order_and_values_to_half_precision() -> None:
    top = drawn(4)
    found = Result.from_bytes(result(packed((2, top))).to_bytes())
    assert fault(found, VOCABULARY) is None
    assert found.top_logprobs is not None
    ids, values = found.top_logprobs.arrays()
    assert found.top_logprobs.positions.tolist() == [2, 3, 4, 5]
    order = np.argsort(top.ids, -1)
    assert (ids == np.take_along_axis(top.ids, order, -1)).all()
    assert np.allclose(values, np.take_along_axis(top.logprobs, order, -1), rtol=2**-11)


def test_a_record_without_top_tokens_has_the_bytes_of_earlier_releases() -> None:
    assert b"top_logprobs" not in result(None).to_map()


def test_turns_of_a_play_keep_their_places() -> None:
    play = Play([1, 2])
    span = Span(Version(0, 1), 0, 2, bytes(32), "keep")
    play.add_turn(Sample([3, 4], [-1.0, -1.0], [span], "end", top=drawn(2)))
    play.add_environment([5])
    play.add_turn(Sample([6, 7], [-1.0, -1.0], [span], "end"))
    play.add_turn(Sample([8, 9], [-1.0, -1.0], [span], "end", top=drawn(2, seed=1)))
    found = play.end("end").top_logprobs
    assert found is not None
    assert found.positions.tolist() == [2, 3, 7, 8]


def test_a_play_with_too_many_top_tokens_goes_without() -> None:
    collected = TopTokens()
    rows = MAX_TOP_BYTES // (6 * 20) + 1
    collected.add(0, np.tile(np.arange(20, dtype=np.uint32), (rows, 1)), np.full((rows, 20), -5, np.float32))
    assert collected.packed() is None


def test_a_log_probability_below_half_precision_stays_finite() -> None:
    found = packed((2, SampledTop(np.array([[1, 2]] * 4, np.uint32), np.array([[-1e6, -0.1]] * 4, np.float32))))
    assert fault(result(found), VOCABULARY) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda top: top._replace(spans=((1, 5),)), "not all sampled"),
        (lambda top: top._replace(spans=((2, 4), (3, 5))), "out of order"),
        (lambda top: top._replace(spans=((2, 9),)), "not all sampled"),
        (lambda top: top._replace(ids=top.ids[:-4]), "bytes for 4 positions"),
        (lambda top: top._replace(values=top.values + bytes(2)), "bytes for 4 positions"),
        (lambda top: top._replace(top_k=2), "bytes for 4 positions"),
        (lambda top: top._replace(ids=bytes(len(top.ids))), "repeated"),
        (lambda top: top._replace(ids=np.tile(np.arange(47, 51, dtype="<u4"), 4).tobytes()), "vocabulary"),
        (lambda top: top._replace(values=bytes(len(top.values))), "no distribution"),
        (lambda top: top._replace(values=np.full(16, np.nan, "<f2").tobytes()), "no distribution"),
        (lambda top: top._replace(values=np.full(16, 0.5, "<f2").tobytes()), "no distribution"),
    ],
)
def test_hostile_values_are_refused(change: Any, said: str) -> None:
    found = Result.from_bytes(result(change(packed((2, drawn(4))))).to_bytes())
    assert said in (fault(found, VOCABULARY) or "")


def test_ids_and_values_together_are_bounded() -> None:
    count = MAX_TOP_BYTES // (6 * 20) + 1
    ids, values = np.tile(np.arange(20, dtype="<u4"), (count, 1)), np.full((count, 20), -5, "<f2")
    top = TopLogprobs(20, ((2, count + 2),), ids.tobytes(), values.tobytes())
    assert "are allowed" in (fault(result(top, count + 2), count + 2) or "")


@pytest.mark.parametrize("spans", [[[0]], [[0, -1]], "x", [[0, 1, 2]]])
def test_a_malformed_field_is_no_record(spans: Any) -> None:
    broken = result(packed((2, drawn(4)))._replace(spans=spans)).to_bytes()
    with pytest.raises(RemoteError, match="top_logprobs"):
        Result.from_bytes(broken)
