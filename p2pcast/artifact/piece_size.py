"""The size of an artifact's pieces. Pure.

A node forwards a piece after it has received and verified the whole piece, and each stripe of a link carries one piece
at a time. Take a chain of k hops with s stripes, and a delta of n pieces. It reaches the last peer (k - 1) · s/n of its
transfer time after the first. This delay is negligible for a large delta, and half of the transfer time for a delta of
a hundred pieces. So a small delta is cut finer, and so is any delta for a deep plan. A piece's own cost sets the lower
limit: 16 bytes of header, 32 bytes of hash on each stripe, and CPU time.

On wide links the CPU time of a piece counts most, and pieces may be larger.
"""

from __future__ import annotations

from typing import Final

from p2pcast.ground.limits import ANCHOR_PIECE_BYTES, KIB, PIECE_BYTES

ENOUGH: Final = 512
"""Pieces from which the delay is small: 5 % of the transfer time on ENOUGH_HOPS hops of four stripes."""
ENOUGH_HOPS: Final = 8
"""Deeper plans need more pieces in proportion."""
LEAST_PIECE_BYTES: Final = 16 * KIB
"""Smallest piece: headers and hashes are 1 % of it on four stripes."""
DEEP_HOPS: Final = 64
"""In a deeper plan pieces may be half as large. Their further 1 % costs 0.05 s of a transfer of 5 s, and each hop gains
2.6 ms at 100 Mbit/s on four stripes.
"""
WIDE_PIECE_BYTES: Final = 256 * KIB
"""Largest piece of a delta on wide links. Measured: relaying costs 1.76 CPU s/GB instead of 2.30 with 64 KiB."""
WIDE_BPS: Final = 200e6
"""Rate of a wide link in bits per second. Derived: there, a wide piece on each of four stripes takes 0.04 s, less than
a keepalive interval (``p2pcast.relay.tuning.ALIVE_ACTIVE_S``). So no limit for lag or silence notices it.
"""


def piece_bytes(expected_bytes: int, hops: int = 1, slowest_bps: float | None = None, *, anchor: bool = False) -> int:
    """Piece size in bytes, a power of two, for a delta of this expected size, or for an anchor of a state of
    this size. ``hops``: of the deepest peer; ``slowest_bps``: rate of the slowest peer, None if not all are known.
    """
    wide = slowest_bps is not None and slowest_bps >= WIDE_BPS
    size = ANCHOR_PIECE_BYTES if anchor else WIDE_PIECE_BYTES if wide else PIECE_BYTES
    least = LEAST_PIECE_BYTES if hops <= DEEP_HOPS else LEAST_PIECE_BYTES // 2
    while size > least and size * ENOUGH * max(hops, ENOUGH_HOPS) > expected_bytes * ENOUGH_HOPS:
        size //= 2
    return size
