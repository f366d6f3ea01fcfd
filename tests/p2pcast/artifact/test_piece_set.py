"""PieceSet against a plain Python set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.piece_set import PieceSet
from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.wire.constraints import PieceRanges

valid_ranges = PieceRanges().reader()

INDEX = st.integers(0, 300) | st.integers(0, 70_000)


def spans(have: list[int]) -> set[int]:
    return {i for a, b in zip(have[::2], have[1::2], strict=True) for i in range(a, b)}


@given(st.integers(0, 40), st.lists(INDEX, max_size=60))
def test_a_piece_set_behaves_as_a_set(start, adds):
    pieces, model = PieceSet(start), set(range(start))
    for index in adds:
        assert pieces.add(index) == (index not in model)
        model.add(index)
        assert index in pieces
    assert pieces.count == len(model)
    assert pieces.prefix == next(i for i in range(len(model) + 1) if i not in model)
    assert all((i in pieces) == (i in model) for i in {*model, *(i + 1 for i in model), 0, 1 << 30})
    have = pieces.ranges()
    assert valid_ranges(tuple(have)) == tuple(have), "the ranges fit the schema of HAVE"
    assert spans(have) == model
    assert list(pieces.lacking([])) == sorted(model)
    assert list(pieces.lacking(have)) == []


@given(st.sets(st.integers(0, 60)), st.lists(st.integers(0, 80), unique=True, max_size=12).map(sorted))
def test_lacking_matches_set_difference(held, cuts):
    have = cuts[: len(cuts) // 2 * 2]
    pieces = PieceSet()
    for index in held:
        pieces.add(index)
    assert list(pieces.lacking(have)) == sorted(held - spans(have))


def test_a_piece_out_of_range_is_refused():
    with pytest.raises(RemoteError):
        PieceSet().add(limits.MAX_PIECES)
    pieces = PieceSet()
    for index in range(0, 2 * limits.MAX_RANGES, 2):
        pieces.add(index)
    assert len(pieces.ranges()) == limits.MAX_RANGES, "at most as many ranges as HAVE may hold"
    assert valid_ranges(tuple(pieces.ranges())) == tuple(pieces.ranges())
