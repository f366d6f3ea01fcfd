"""How fast a child receives, and how much its parent has that it lacks: from what children tell of this the hub finds who is slow. Pure: time is passed in."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 0.25
"""A rate is of so much time at least: what comes in less is bursts."""
ROUND_TRIPS: Final = 4
"""And of so many: a loss holds up what is behind it for one or two, and then it is all there. To be moved takes as many."""
CATCH_UP_S: Final = 0.3
CATCH_UP_ROUND_TRIPS: Final = 1.2
"""Who would take longer than either to draw level with its parent says so at once, and again after each window, instead of with its next report. On
an ordinary hop that is above what is under way."""


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
        self._rtt_s = 0.0
        self._told_at = -math.inf

    def begin(self, now: float, got_bytes: int) -> None:
        """A transfer begins, or another parent. ``got_bytes``: a count that only grows."""
        self.inflow = None
        self._points.clear()
        self._points.append((now, got_bytes))

    @property
    def lags(self) -> bool:
        """It would take long to draw level with the parent at this inflow."""
        catch_up_s = max(CATCH_UP_S, CATCH_UP_ROUND_TRIPS * self._rtt_s)
        return self.inflow is not None and 8.0 * self.inflow.behind_bytes > catch_up_s * self.inflow.bps

    def look(self, now: float, got_bytes: int, behind_bytes: int, rtt_s: float = 0.0) -> bool:
        """Whether the hub should hear of it at once. ``rtt_s``: to the parent and back."""
        points, window_s, self._rtt_s = self._points, max(WINDOW_S, ROUND_TRIPS * rtt_s), rtt_s
        while len(points) > 1 and now - points[1][0] >= window_s:
            points.popleft()
        since, had = points[0]
        points.append((now, got_bytes))
        if now - since < window_s:
            return False
        self.inflow = Inflow(got_bytes - had, now - since, behind_bytes)
        if not self.lags or now - self._told_at < window_s:
            return False
        self._told_at = now
        return True
