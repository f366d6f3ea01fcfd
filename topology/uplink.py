"""What the hub's uplink carries (ECHO-2's B0), from what its sockets have sent.

One head alone shows its own rate; the uplink shows when several pull at once. So a window counts if more than one had payload waiting at both its
ends, and the fastest of the newest windows is what the uplink is known to carry: at least that, and just that wherever more was wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import Final

WINDOW_S: Final = 0.25
"""Long enough for a round trip's worth of acknowledgements to be no matter."""
KEPT: Final = 4096
"""Windows that are remembered: a quarter of an hour of sending. An uplink that has shrunk is found out after it."""


class Uplink:
    """`look` as often as you like; windows are never shorter than `WINDOW_S`."""

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
        """How many count."""
        return len(self._windows)

    def look(self, now_s: float, sent: Mapping[str, int], pulling: Set[str]) -> bool:
        """`sent`: bytes that the other side has acknowledged, by link; `pulling`: the links with payload waiting. True when a window counted."""
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
