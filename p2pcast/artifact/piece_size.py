"""Chooses the size of an artifact's pieces. Pure.

A node forwards a piece only after receiving and verifying all of it, and each stripe of a link carries one piece at a
time. In a chain of k hops with s stripes, a delta of n pieces reaches the last peer later than the first, by (k - 1) ·
s/n of its transfer time. This delay is negligible for a large delta, but can be half the transfer time for a delta of a
hundred pieces. So small deltas, and all deltas in a deep plan, are cut into smaller pieces. The cost per piece sets the
lower limit: 16 bytes of header, 32 bytes of hash on each stripe, and CPU time.

On fast links, the CPU time per piece matters most, so pieces may be larger.
"""

from __future__ import annotations

from typing import Final

from p2pcast.ground.limits import ANCHOR_PIECE_BYTES, KIB, PIECE_BYTES

ENOUGH: Final = 512
"""Number of pieces at which the delay is small: 5 % of the transfer time over ENOUGH_HOPS hops with four stripes."""
ENOUGH_HOPS: Final = 8
"""Number of hops up to which ENOUGH pieces suffice; deeper plans need proportionally more."""
LEAST_PIECE_BYTES: Final = 16 * KIB
"""Smallest piece: with four stripes, headers and hashes amount to 1 % of it."""
DEEP_HOPS: Final = 64
"""In deeper plans, pieces may be half as large. The additional 1 % costs 0.05 s of a 5 s transfer, and each hop saves
2.6 ms at 100 Mbit/s with four stripes.
"""
WIDE_PIECE_BYTES: Final = 256 * KIB
"""Largest piece of a delta on fast links. Measured: relaying costs 1.76 CPU s/GB, and 2.30 with 64 KiB pieces."""
WIDE_BPS: Final = 200e6
"""Lowest rate of a fast link in bits per second. At this rate, a large piece on each of four stripes takes 0.04 s. That
is less than a keepalive interval (``p2pcast.relay.tuning.ALIVE_ACTIVE_S``), so no limit on lag or silence is affected.
"""


def piece_bytes(expected_bytes: int, hops: int = 1, slowest_bps: float | None = None, *, anchor: bool = False) -> int:
    """Return the piece size in bytes, a power of two, for a delta of this expected size or an anchor of a state of this
    size. ``hops``: the deepest peer's; ``slowest_bps``: the slowest peer's rate, None if not all rates are known.
    """
    wide = slowest_bps is not None and slowest_bps >= WIDE_BPS
    size = ANCHOR_PIECE_BYTES if anchor else WIDE_PIECE_BYTES if wide else PIECE_BYTES
    least = LEAST_PIECE_BYTES if hops <= DEEP_HOPS else LEAST_PIECE_BYTES // 2
    while size > least and size * ENOUGH * max(hops, ENOUGH_HOPS) > expected_bytes * ENOUGH_HOPS:
        size //= 2
    return size
