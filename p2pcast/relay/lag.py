"""How fast a child receives, and how much its parent has that it lacks: from what children tell of this the hub finds who is slow. Pure: time is passed in."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 0.25
"""A rate is of so much time at least: what comes in less is bursts."""
CATCH_UP_S: Final = 0.3
"""Who would take longer than this to draw level with its parent says so at once, and again after each window, instead of with its next report. On
an ordinary hop that is above what is under way, up to a round trip of a quarter of a second."""


@dataclass(frozen=True, slots=True)
class Inflow:
    """``got_bytes`` came in the last ``span_s``; the parent has ``behind_bytes`` that are not here."""

    got_bytes: int
    span_s: float
    behind_bytes: int

    @property
    def bps(self) -> float:
        return 8.0 * self.got_bytes / self.span_s


class Lag:
    """One transfer from one parent: ``begin`` it, and ``look`` every now and then."""

    def __init__(self) -> None:
        self.inflow: Inflow | None = None
        """As of the last look; None until a window has passed."""
        self._points: deque[tuple[float, int]] = deque()
        self._told_at = -math.inf

    def begin(self, now: float, got_bytes: int) -> None:
        """A transfer begins, or another parent. ``got_bytes``: a count that only grows."""
        self.inflow = None
        self._points.clear()
        self._points.append((now, got_bytes))

    @property
    def lags(self) -> bool:
        """It would take long to draw level with the parent at this inflow."""
        return self.inflow is not None and 8.0 * self.inflow.behind_bytes > CATCH_UP_S * self.inflow.bps

    def look(self, now: float, got_bytes: int, behind_bytes: int) -> bool:
        """Whether the hub should hear of it at once."""
        points = self._points
        while len(points) > 1 and now - points[1][0] >= WINDOW_S:
            points.popleft()
        since, had = points[0]
        points.append((now, got_bytes))
        if now - since < WINDOW_S:
            return False
        self.inflow = Inflow(got_bytes - had, now - since, behind_bytes)
        if not self.lags or now - self._told_at < WINDOW_S:
            return False
        self._told_at = now
        return True
