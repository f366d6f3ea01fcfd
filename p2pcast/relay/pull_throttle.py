"""Limits pulling while a version is in transfer. Pure: time is passed in.

While a version passes through a node, all pulling from and by the node shares a small part of what its link is known to
carry. The part is small enough not to delay the version, and never zero: so a peer still catches up if the trainer
never pauses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from p2pcast.relay.tuning import (
    PULL_FLOOR_BYTES_S,
    PULL_LEAST_BYTES_S,
    PULL_SHARE,
    RATE_WINDOW_S,
    THROUGHPUT_WINDOWS,
)


class Throughput:
    """The highest rate of any window, from counters that only grow."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._counted: Mapping[object, int] = {}
        self._windows: deque[float] = deque(maxlen=THROUGHPUT_WINDOWS)
        self.peak_bytes_s = 0.0

    def sample(self, now_s: float, counted: Mapping[object, int]) -> None:
        """Take a sample. ``counted``: bytes so far, by link. Calls within one window have no effect."""
        if self._at_s is not None and now_s - self._at_s < RATE_WINDOW_S:
            return
        if self._at_s is not None:
            grown = sum(max(0, count - self._counted[link]) for link, count in counted.items() if link in self._counted)
            if grown > 0:
                self._windows.append(grown / (now_s - self._at_s))
                self.peak_bytes_s = max(self._windows)
        self._at_s, self._counted = now_s, dict(counted)


def pull_bytes_s(peak_bytes_s: float, links: int) -> int:
    """Return the bytes per second for each of ``links`` pull links while a version is in transfer."""
    return max(PULL_LEAST_BYTES_S, int(max(PULL_FLOOR_BYTES_S, PULL_SHARE * peak_bytes_s) / max(1, links)))
