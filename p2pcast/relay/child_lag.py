"""Measures how fast a child receives, and how many bytes it is behind its parent. Pure: time is passed in. Children
report both, and the hub finds slow peers and links from the reports.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from p2pcast.relay.tuning import CATCH_UP_ROUND_TRIPS, CATCH_UP_S, LAG_WINDOW_ROUND_TRIPS, RATE_WINDOW_S


@dataclass(frozen=True, slots=True)
class Inflow:
    """``got_bytes`` arrived in the last ``span_s``; the parent has ``behind_bytes`` more."""

    got_bytes: int
    span_s: float
    behind_bytes: int

    @property
    def bps(self) -> float:
        return 8.0 * self.got_bytes / self.span_s


class ChildLag:
    """One transfer from one parent. Call ``begin``, then ``sample`` every few tens of milliseconds."""

    def __init__(self) -> None:
        self.inflow: Inflow | None = None
        """The inflow as of the last sample; None until one window has passed."""
        self._points: deque[tuple[float, int]] = deque()
        self._rtt_s = 0.0
        self._reported_at = -math.inf

    def begin(self, now: float, got_bytes: int) -> None:
        """Start measuring: a transfer begins, or the parent changes. ``got_bytes``: a count that only grows."""
        self.inflow = None
        self._points.clear()
        self._points.append((now, got_bytes))

    @property
    def lags(self) -> bool:
        """Whether the child would take long to catch up with its parent at this inflow."""
        catch_up_s = max(CATCH_UP_S, CATCH_UP_ROUND_TRIPS * self._rtt_s)
        return self.inflow is not None and 8.0 * self.inflow.behind_bytes > catch_up_s * self.inflow.bps

    def sample(self, now: float, got_bytes: int, behind_bytes: int, rtt_s: float = 0.0) -> bool:
        """Take a sample. Returns whether the child should report at once: at most once per window."""
        points, window_s = self._points, max(RATE_WINDOW_S, LAG_WINDOW_ROUND_TRIPS * rtt_s)
        self._rtt_s = rtt_s
        while len(points) > 1 and now - points[1][0] >= window_s:
            points.popleft()
        since, had = points[0]
        points.append((now, got_bytes))
        if now - since < window_s:
            return False
        self.inflow = Inflow(got_bytes - had, now - since, behind_bytes)
        if not self.lags or now - self._reported_at < window_s:
            return False
        self._reported_at = now
        return True
