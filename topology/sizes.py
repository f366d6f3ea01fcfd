"""How large versions of a run are, as plans are made for them, and pieces are cut (`p2pcast.artifact.piece_size`): hops weigh more where there is less to send.

A plan is to suit what goes down it version after version. So the median of the newest deltas counts, to a power of two, and moves only when that median
has left it by a factor of two: sizes that wobble, and one whole state or one long branch among them, change no plan. What a better size brings has to be worth the moves
besides (`topology.plan`), and to last (`topology.laggards.Patience`).

Before the first delta a share of the state stands for it. Bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low
from typing import Final

from topology.model import TYPICAL_PAYLOAD_BYTES

COUNTED: Final = 5
"""Newest deltas: two that stand out among them change nothing."""
WOBBLE: Final = 2.0
"""A median this far away, up or down, is another size. Half of that is lost in rounding, so it takes a factor of the square root of two at least to come back."""
SHARE: Final = 1 / 256
"""Of the state, until a delta is known: 64 MiB of an 8B model's 16 GB."""
SMALLEST: Final = 1 << 20
"""Less is through in a moment by any plan, tells nothing of rates, and would have the hub feed so many itself that a large version paid for it."""


class Sizes:
    """`bytes`: what plans are made for."""

    def __init__(self) -> None:
        self.bytes = TYPICAL_PAYLOAD_BYTES
        self._newest: deque[int] = deque(maxlen=COUNTED)

    def state(self, nbytes: int) -> None:
        """The whole state has so many."""
        if not self._newest:
            self.bytes = _rounded(nbytes * SHARE)

    def published(self, *deltas: int) -> bool:
        """Deltas that went out, oldest first. Whether plans are made for another size now."""
        self._newest.extend(deltas)
        before = self.bytes
        if self._newest:
            middle = max(median_low(self._newest), SMALLEST)
            if not self.bytes / WOBBLE < middle < self.bytes * WOBBLE:
                self.bytes = _rounded(middle)
        return self.bytes != before


def of_steps(stored: Iterable[tuple[tuple[int, int], tuple[int, int], int]]) -> list[int]:
    """Sizes of the newest versions' own deltas, oldest first, of (base, version, bytes) of all that are kept: squashes to the same version have an older base."""
    steps: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    for base, version, nbytes in stored:
        if version not in steps or steps[version][0] < base:
            steps[version] = base, nbytes
    return [steps[version][1] for version in sorted(steps)[-COUNTED:]]


def _rounded(nbytes: float) -> int:
    """To the nearest power of two, by ratio."""
    return 1 << round(math.log2(max(nbytes, SMALLEST)))
