"""How far pulling gives way to a version that is on its way. Pure: time is passed in.

While a version passes through a node, all that others pull from it, or it from others, shares a small part of what its link is known to carry: so little that the
version is not held up, and never nothing, so that who catches up behind a trainer that never rests arrives all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from p2pcast import limits

SHARE: Final = 1 / 64
"""Of the link, for all pulling together, each way."""
FLOOR_BYTES_S: Final = 32 * limits.KIB
"""Where nothing has been measured, or a link is slower than any that versions should be sent over."""
LEAST_BYTES_S: Final = 4 * limits.KIB
"""For one link: several packets a second, so that its silence still means something."""
WINDOW_S: Final = 0.25
KEPT: Final = 1200
"""Windows that are remembered: five minutes of sending."""


class Throughput:
    """The most that has passed in a window, by counters that only grow."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._counted: Mapping[object, int] = {}
        self._windows: deque[float] = deque(maxlen=KEPT)
        self.peak_bytes_s = 0.0

    def look(self, now_s: float, counted: Mapping[object, int]) -> None:
        """``counted``: bytes so far, by link; as often as you like."""
        if self._at_s is not None and now_s - self._at_s < WINDOW_S:
            return
        if self._at_s is not None:
            grown = sum(max(0, count - self._counted[link]) for link, count in counted.items() if link in self._counted)
            if grown > 0:
                self._windows.append(grown / (now_s - self._at_s))
                self.peak_bytes_s = max(self._windows)
        self._at_s, self._counted = now_s, dict(counted)


def trickle_bytes_s(peak_bytes_s: float, links: int) -> int:
    """For each of ``links`` over which is pulled, while a version is on its way."""
    return max(LEAST_BYTES_S, int(max(FLOOR_BYTES_S, SHARE * peak_bytes_s) / max(1, links)))
