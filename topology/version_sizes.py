"""The typical size of a run's versions in bytes, for plans and for piece sizes (`p2pcast.artifact.piece_size`). The
smaller a version, the more its hops count.

A plan must suit many versions in a row. So the typical size is the median of the newest deltas, as a power of two. It
changes only when that median differs by a factor of two: fluctuating sizes, or a single large version, change no plan.
A new size changes a plan only for a lasting gain worth its moves (`topology.plan`, `topology.slow_peers.Patience`).

Before the first delta, a share of the state's size counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low
from typing import Final

from topology.broadcast_time import TYPICAL_PAYLOAD_BYTES

COUNTED: Final = 5
"""Number of newest deltas in the median: two outliers change nothing."""
WOBBLE: Final = 2.0
"""Factor, up or down, at which the median counts as another size. Rounding loses half of it, so a return takes at least
a factor of the square root of two.
"""
SHARE: Final = 1 / 256
"""Share of the state that counts until a delta is known: 64 MiB of an 8B model's 16 GB."""
ROOM_RATIO: Final = 2
"""Room on disk for the next delta, as a multiple of the largest one known."""
RECORDS_BYTES: Final = 64 << 10
"""Room on disk for a version's records beside its artifact."""
SMALLEST: Final = 1 << 20
"""Smallest typical size in bytes. A smaller version is fast by any plan and measures no rates. A plan for it would have
the hub feed many peers itself, which delays a large version.
"""


class VersionSizes:
    """`bytes`: the typical size, for which plans are made. When the last version began: `hops` of the deepest peer, and
    `slowest_bps`, the slowest peer's rate; None if not all rates were known.
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
        """Add the sizes of published deltas, oldest first. Returns whether the typical size has changed."""
        self._newest.extend(deltas)
        before = self.bytes
        if self._newest:
            middle = max(median_low(self._newest), SMALLEST)
            if not self.bytes / WOBBLE < middle < self.bytes * WOBBLE:
                self.bytes = _rounded(middle)
        return self.bytes != before


def of_steps(stored: Iterable[tuple[tuple[int, int], tuple[int, int], int]]) -> list[int]:
    """Sizes of the newest versions' own deltas, oldest first. `stored`: (base, version, bytes) of all kept deltas and
    squashes; a squash to the same version has an older base.
    """
    steps: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    for base, version, nbytes in stored:
        if version not in steps or steps[version][0] < base:
            steps[version] = base, nbytes
    return [steps[version][1] for version in sorted(steps)[-COUNTED:]]


def room_for_next(stored: Iterable[tuple[tuple[int, int], tuple[int, int], int]]) -> int:
    """Bytes on disk to keep free for the delta of the next version, which may be larger than those before. `stored` as
    in `of_steps`.
    """
    return ROOM_RATIO * max(of_steps(stored), default=0) + RECORDS_BYTES


def _rounded(nbytes: float) -> int:
    """The nearest power of two, by ratio."""
    return 1 << round(math.log2(max(nbytes, SMALLEST)))
