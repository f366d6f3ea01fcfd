"""Small deltas have enough pieces for a chain's hops; large deltas have no more than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.piece_size import ENOUGH, LEAST_PIECE_BYTES, piece_bytes
from p2pcast.limits import GIB, MIB, MIN_PIECE_BYTES, PIECE_BYTES


def test_piece_sizes_of_given_deltas() -> None:
    assert [piece_bytes(size * MIB) >> 10 for size in (0, 1, 8, 15, 16, 31, 32, 1024)] == [
        16,
        16,
        16,
        16,
        32,
        32,
        64,
        64,
    ]
    anchors = [piece_bytes(size * MIB, anchor=True) >> 10 for size in (0, 8, 16, 64, 256, 511, 512, 65536)]
    assert anchors == [16, 16, 32, 128, 512, 512, 1024, 1024]


@given(st.integers(0, 64 * GIB))
def test_piece_is_the_largest_that_leaves_enough_pieces(expected: int) -> None:
    piece = piece_bytes(expected)
    assert piece & (piece - 1) == 0
    assert MIN_PIECE_BYTES <= LEAST_PIECE_BYTES <= piece <= PIECE_BYTES
    assert piece == LEAST_PIECE_BYTES or piece * ENOUGH <= expected
    assert piece == PIECE_BYTES or 2 * piece * ENOUGH > expected
