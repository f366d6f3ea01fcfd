"""Decides whether a process's memory, descriptors or tasks grow. Pure.

The *level* is the median of the first third of the readings after warm-up. The *growth* is the Theil–Sen slope (the
median of the slopes of all pairs, which tolerates readings during a transfer) times the time span. A resource is flat
if it grows by no more than ``SHARE`` of the level or the allowance, whichever is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

SHARE: Final = 0.05
FEWEST: Final = 6
"""Least number of readings for a verdict."""


@dataclass(frozen=True, slots=True)
class Trend:
    """``level`` and ``growth`` in the unit of the readings; growth over their whole span."""

    level: float
    growth: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.growth <= max(SHARE * self.level, self.allowed)


def trend(readings: Sequence[tuple[float, float]], allowed: float) -> Trend | None:
    """``readings``: (seconds, value), ascending. None if there are too few."""
    if len(readings) < FEWEST:
        return None
    level = median(value for _, value in readings[: len(readings) // 3])
    slope = median((b - a) / (t - s) for (s, a), (t, b) in combinations(readings, 2) if t > s)
    return Trend(level, slope * (readings[-1][0] - readings[0][0]), allowed)
