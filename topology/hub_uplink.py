"""Measures the rate of the hub's uplink (ECHO-2's B0) from the bytes that the hub's sockets have sent.

A single head shows its own rate; several at once show the uplink's. So a time window counts only if the same links,
more than one, had payload waiting at its start and at its end. The fastest recent window is a lower bound of the
uplink's rate. It equals that rate if the links wanted more than the uplink could send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Final

WINDOW_S: Final = 0.25
"""Minimum length of a window in seconds: long compared with a round trip, by which acknowledgements lag."""
KEPT: Final = 4096
"""Number of stored windows: about a quarter of an hour of sending. A slower uplink is noticed after that time."""


class Uplink:
    """The measured windows. `sample` may be called at any interval; windows are never shorter than `WINDOW_S`."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._sent: Mapping[str, int] = {}
        self._pulling: Set[str] = frozenset()
        self._windows: deque[float] = deque(maxlen=KEPT)

    @property
    def bps(self) -> float | None:
        """The uplink's rate in bits per second; None before the first window."""
        return max(self._windows, default=None)

    @property
    def windows(self) -> int:
        """Number of windows that count."""
        return len(self._windows)

    def sample(self, now_s: float, sent: Mapping[str, int], pulling: Set[str]) -> bool:
        """Take a sample and return whether it completed a window that counts. `sent`: acknowledged bytes by link;
        `pulling`: links with payload waiting.
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
