"""How large the pieces of an artifact are. Pure.

A node passes a piece on once it has all of it and has checked it, and as many pieces as a link has stripes are on its way at once. So on a chain of k hops of s stripes, a
delta of n pieces is at the last peer (k - 1) · s/n of its time later than at the first. That is nothing for a large delta, and half of the time for one of a hundred
pieces. So artifacts of less than ENOUGH pieces are cut finer, down to what a piece costs by itself: 16 bytes of header, 32 of a hash on each stripe, and processors' time.
"""

from __future__ import annotations

from typing import Final

from p2pcast.limits import ANCHOR_PIECE_BYTES, KIB, PIECE_BYTES

ENOUGH: Final = 512
"""Pieces: on eight hops of four stripes 5 % of the time."""
LEAST_PIECE_BYTES: Final = 16 * KIB
"""Headers and hashes are 1 % of it on four stripes."""


def piece_bytes(expected_bytes: int, *, anchor: bool = False) -> int:
    """For a delta of about so many bytes, or an anchor of a state of so many: a power of two."""
    size = ANCHOR_PIECE_BYTES if anchor else PIECE_BYTES
    while size > LEAST_PIECE_BYTES and size * ENOUGH > expected_bytes:
        size //= 2
    return size
