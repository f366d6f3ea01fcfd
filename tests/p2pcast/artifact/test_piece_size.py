"""Deltas have enough pieces for a plan's hops, and no more than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.piece_size import (
    DEEP_HOPS,
    ENOUGH,
    ENOUGH_HOPS,
    LEAST_PIECE_BYTES,
    WIDE_BPS,
    WIDE_PIECE_BYTES,
    piece_bytes,
)
from p2pcast.ground.limits import ANCHOR_PIECE_BYTES, GIB, MIB, MIN_PIECE_BYTES, PIECE_BYTES
from p2pcast.relay.tuning import ALIVE_ACTIVE_S
from p2pcast.transport.stripe_count import FEWEST


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
    deep = [piece_bytes(64 * MIB, hops) >> 10 for hops in (1, 8, 16, 17, 32, 64, 65, 333)]
    assert deep == [64, 64, 64, 32, 32, 16, 8, 8]
    assert piece_bytes(8 << 30, 333) == PIECE_BYTES
    assert anchors == [16, 16, 32, 128, 512, 512, 1024, 1024]


def test_wide_links_carry_larger_pieces_once_all_rates_are_known() -> None:
    rates = (None, 0.99 * WIDE_BPS, WIDE_BPS, 1e10)
    assert [piece_bytes(GIB, 1, rate) >> 10 for rate in rates] == [64, 64, 256, 256]
    assert [piece_bytes(size * MIB, 1, 1e10) >> 10 for size in (1, 31, 32, 64, 127, 128)] == [16, 32, 64, 128, 128, 256]
    assert piece_bytes(GIB, 1, 1e10, anchor=True) == ANCHOR_PIECE_BYTES
    assert 8 * FEWEST * WIDE_PIECE_BYTES / WIDE_BPS < ALIVE_ACTIVE_S


@given(st.integers(0, 64 * GIB), st.integers(1, 10_000))
def test_piece_is_the_largest_that_leaves_enough_pieces(expected: int, hops: int) -> None:
    piece, enough = piece_bytes(expected, hops), ENOUGH * max(hops, ENOUGH_HOPS) / ENOUGH_HOPS
    least = LEAST_PIECE_BYTES if hops <= DEEP_HOPS else LEAST_PIECE_BYTES // 2
    assert piece & (piece - 1) == 0
    assert MIN_PIECE_BYTES <= least <= piece <= PIECE_BYTES
    assert piece == least or piece * enough <= expected
    assert piece == PIECE_BYTES or 2 * piece * enough > expected
