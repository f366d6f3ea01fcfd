"""The measured rate of the hub's uplink (ECHO-2's B0), from the bytes that its sockets have sent.

A single head shows its own rate; several at once show the uplink's. So a time window counts only if more than one link
had payload waiting at both its ends. The fastest of the newest windows is a lower bound of the uplink's rate, and
equals it wherever more was wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Final

WINDOW_S: Final = 0.25
"""Length of a window in seconds: long compared with the acknowledgements of one round trip."""
KEPT: Final = 4096
"""Number of stored windows, a quarter of an hour of sending: the delay until a slower uplink is noticed."""


class Uplink:
    """Windows of measurement. Call `sample` at any interval; windows are never shorter than `WINDOW_S`."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._sent: Mapping[str, int] = {}
        self._pulling: Set[str] = frozenset()
        self._windows: deque[float] = deque(maxlen=KEPT)

    @property
    def bps(self) -> float | None:
        """Bits per second; None before the first window."""
        return max(self._windows, default=None)

    @property
    def windows(self) -> int:
        """Number of windows that count."""
        return len(self._windows)

    def sample(self, now_s: float, sent: Mapping[str, int], pulling: Set[str]) -> bool:
        """Take a sample. `sent`: acknowledged bytes by link; `pulling`: links with payload waiting. Returns whether a
        window counted.
        """
        if self._at_s is not None and now_s - self._at_s < WINDOW_S:
            return False
        counted = False
        both = self._pulling & pulling
        if self._at_s is not None and len(both) > 1:
            grown = sum(max(0, count - self._sent[link]) for link, count in sent.items() if link in self._sent)
            if grown > 0:
                self._windows.append(8.0 * grown / (now_s - self._at_s))
                counted = True
        self._at_s, self._sent, self._pulling = now_s, dict(sent), frozenset(pulling)
        return counted
