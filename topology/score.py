"""How good a peer is at passing bytes on, from its measured transfers.

The formula is that of ECHO-2 (appendix C.3, "Worker scoring"); its weights and windows are that paper's operational defaults:

    Score = Decay * (0.5 Speed + 0.35 Success + 0.15 Stability)

Every part but Decay runs from 0 to 100. There is no clock here: `now_s` is any clock that only moves forward, the same one in every call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

SPEED_WEIGHT: Final = 0.5
SUCCESS_WEIGHT: Final = 0.35
STABILITY_WEIGHT: Final = 0.15
SPEED_FLOOR_LOG10: Final = 3.0
"""1 kB/s and less is Speed 0."""
SPEED_SPAN_LOG10: Final = 5.0
"""100 MB/s and more is Speed 100."""
MAX_FAILURES_IN_ROW: Final = 3
"""More than this many, and a peer is not stable at all."""
STABLE_SUCCESSES: Final = 10
DECAY_WINDOW_S: Final = 600.0
MAX_DECAY: Final = 0.3
EWMA_WEIGHT: Final = 0.3
"""Weight of the newest transfer in the average rate: the last six make up nearly nine tenths of it."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """What has been measured of one peer. Immutable: `record` returns the next state."""

    bytes_per_s: float | None = None
    """Moving average over good transfers; None before the first."""
    good: int = 0
    bad: int = 0
    failures_in_row: int = 0
    last_s: float | None = None
    """When the newest transfer ended, good or bad."""

    @property
    def bps(self) -> float | None:
        """The average rate in bits per second, as `Member.bps` wants it."""
        return None if self.bytes_per_s is None else 8.0 * self.bytes_per_s

    def record(self, now_s: float, transferred_bytes: int, seconds: float, ok: bool) -> Transfers:
        """One transfer that ended at `now_s`. A bad one, or one without bytes or duration, says nothing about the rate."""
        last_s = now_s if self.last_s is None else max(now_s, self.last_s)
        if not ok:
            return replace(self, bad=self.bad + 1, failures_in_row=self.failures_in_row + 1, last_s=last_s)
        rate = self.bytes_per_s
        if transferred_bytes > 0 and seconds > 0:
            sample = transferred_bytes / seconds
            rate = sample if rate is None else rate + EWMA_WEIGHT * (sample - rate)
        return replace(self, bytes_per_s=rate, good=self.good + 1, failures_in_row=0, last_s=last_s)


@dataclass(frozen=True, slots=True)
class Score:
    """A score and the parts that it was made of. `decay` is the factor, 0.7 to 1."""

    total: float
    speed: float
    success: float
    stability: float
    decay: float


def score(transfers: Transfers, now_s: float) -> Score | None:
    """The peer's score at `now_s`; None for one that has never been measured, which a planner takes for the median."""
    tried = transfers.good + transfers.bad
    if tried == 0 or transfers.last_s is None:
        return None
    speed = _speed(transfers.bytes_per_s)
    success = 100.0 * transfers.good / tried
    stability = 0.0
    if transfers.failures_in_row <= MAX_FAILURES_IN_ROW:
        stability = 100.0 * min(transfers.good / STABLE_SUCCESSES, 1.0)
    idle_s = max(0.0, now_s - transfers.last_s)
    decay = 1.0 - min(idle_s / DECAY_WINDOW_S, MAX_DECAY)
    total = decay * (SPEED_WEIGHT * speed + SUCCESS_WEIGHT * success + STABILITY_WEIGHT * stability)
    return Score(total, speed, success, stability, decay)


def _speed(bytes_per_s: float | None) -> float:
    if bytes_per_s is None or bytes_per_s <= 0:
        return 0.0
    return min(100.0, max(0.0, 100.0 * (math.log10(bytes_per_s) - SPEED_FLOOR_LOG10) / SPEED_SPAN_LOG10))
