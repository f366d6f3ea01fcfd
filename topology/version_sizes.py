"""Estimates the typical size of a run's versions in bytes, for plans and for piece sizes
(`p2pcast.artifact.piece_size`). The smaller a version, the more the hops matter.

A plan must suit many versions in a row. So the typical size is the median of the newest deltas, rounded to a power of
two. It changes only when that median differs by a factor of two, so fluctuations or a single large version change no
plan. A new size changes a plan only for a lasting gain worth the moves (`topology.plan`,
`topology.slow_peers.Patience`).

Before the first delta, a fixed share of the state's size is used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low
from typing import Final

from topology.broadcast_time import TYPICAL_PAYLOAD_BYTES

COUNTED: Final = 5
"""Number of newest deltas in the median: with five, two outliers change nothing."""
WOBBLE: Final = 2.0
"""Factor, up or down, at which the median counts as a different size. Rounding may use up half of it, so a return takes
at least a factor of the square root of two.
"""
SHARE: Final = 1 / 256
"""Share of the state that is used until a delta is known: 64 MiB of an 8B model's 16 GB."""
ROOM_RATIO: Final = 2
"""Disk space reserved for the next delta, as a multiple of the largest one known."""
RECORDS_BYTES: Final = 64 << 10
"""Disk space reserved for a version's records, in addition to its artifact."""
SMALLEST: Final = 1 << 20
"""Smallest typical size in bytes. A smaller version is fast with any plan, and its transfers measure no rates. A plan
made for it would have the hub feed many peers itself, which delays a large version.
"""


class VersionSizes:
    """`bytes`: the typical size, for which plans are made. `hops` and `slowest_bps` date from the start of the newest
    version: the depth of the deepest peer, and the slowest peer's rate, or None if not all rates were known.
    """

    def __init__(self) -> None:
        self.bytes, self.hops = TYPICAL_PAYLOAD_BYTES, 1
        self.slowest_bps: float | None = None
        self._newest: deque[int] = deque(maxlen=COUNTED)

    def state(self, nbytes: int) -> None:
        """Set the size of the whole state in bytes."""
        if not self._newest:
            self.bytes = _rounded(nbytes * SHARE)

    def published(self, *deltas: int) -> bool:
        """Add the sizes of published deltas, oldest first, and return whether the typical size has changed."""
        self._newest.extend(deltas)
        before = self.bytes
        if self._newest:
            middle = max(median_low(self._newest), SMALLEST)
            if not self.bytes / WOBBLE < middle < self.bytes * WOBBLE:
                self.bytes = _rounded(middle)
        return self.bytes != before


def of_steps(stored: Iterable[tuple[tuple[int, int], tuple[int, int], int]]) -> list[int]:
    """Return the sizes of the newest versions' own deltas, oldest first. `stored`: (base, version, bytes) of all stored
    deltas and squashes; a squash to the same version has an older base.
    """
    steps: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    for base, version, nbytes in stored:
        if version not in steps or steps[version][0] < base:
            steps[version] = base, nbytes
    return [steps[version][1] for version in sorted(steps)[-COUNTED:]]


def room_for_next(stored: Iterable[tuple[tuple[int, int], tuple[int, int], int]]) -> int:
    """Return the bytes of disk space to keep free for the next version's delta, which may be larger than those before.
    `stored`: as in `of_steps`.
    """
    return ROOM_RATIO * max(of_steps(stored), default=0) + RECORDS_BYTES


def _rounded(nbytes: float) -> int:
    """Return the nearest power of two, by ratio."""
    return 1 << round(math.log2(max(nbytes, SMALLEST)))
