"""A peer's score: how well it forwards bytes, from its measured transfers.

The formula, its weights and its windows are ECHO-2's (appendix C.3, "Worker scoring"):

    Score = Decay * (0.5 Speed + 0.35 Success + 0.15 Stability)

Speed is logarithmic in bits per second, from 1 kbit/s to a cap. The cap is 100 Mbit/s in the paper. Here it is the
caller's value, or else the fastest peer's rate if that is higher, so that the scores of fast peers still differ. Every
part except Decay is 0 to 100. No clock is read: all calls pass `now_s` from one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

SPEED_WEIGHT: Final = 0.5
SUCCESS_WEIGHT: Final = 0.35
STABILITY_WEIGHT: Final = 0.15
SPEED_FLOOR_BPS: Final = 1e3
"""Highest rate with Speed 0, in bits/s."""
DEFAULT_CAP_BPS: Final = 1e8
"""Lowest rate with Speed 100, in bits/s, unless the caller states a cap or a peer is faster."""
HIGHEST_CAP_BPS: Final = 1e12
"""Upper bound of a measured cap in bits/s, so that a false claim of a high rate cannot lower all other scores."""
MAX_FAILURES_IN_ROW: Final = 3
"""Stability is 0 after more failures in a row than this."""
STABLE_SUCCESSES: Final = 10
"""Number of successes for full Stability."""
RECORD: Final = 256
"""Number of recorded transfers at which both counts are halved, so that old failures lose weight."""
DECAY_WINDOW_S: Final = 600.0
"""Idle time in seconds over which Decay would fall by 1; it falls by at most MAX_DECAY."""
MAX_DECAY: Final = 0.3
"""Greatest reduction of the score by Decay."""
EWMA_WEIGHT: Final = 0.3
"""Weight of the newest transfer in the moving average: the last six make up nearly nine tenths."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """The measurements of one peer. Immutable: `record` returns the next state."""

    bytes_per_s: float | None = None
    """Moving average over successful transfers; None before the first."""
    good: int = 0
    bad: int = 0
    failures_in_row: int = 0
    last_s: float | None = None
    """End of the newest transfer, good or bad, in seconds of the caller's clock."""

    @property
    def bps(self) -> float | None:
        """The average rate in bits per second, as `Member.bps` wants it."""
        return None if self.bytes_per_s is None else 8.0 * self.bytes_per_s

    def record(self, now_s: float, transferred_bytes: int, seconds: float, ok: bool) -> Transfers:
        """Return the state after one more transfer, which ended at `now_s`. A failed transfer, or one without bytes or
        duration, leaves the rate unchanged.
        """
        if self.good + self.bad >= RECORD:
            return replace(self, good=self.good // 2, bad=self.bad // 2).record(now_s, transferred_bytes, seconds, ok)
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
    """A score and its parts. `decay` is the factor, 0.7 to 1."""

    total: float
    speed: float
    success: float
    stability: float
    decay: float


def speed_cap_bps(rates_bps: Iterable[float | None], stated_bps: float | None = None) -> float:
    """Return the rate with Speed 100 in bits/s: as stated, else the fastest of these rates, within its bounds."""
    if stated_bps is not None:
        return max(stated_bps, 2 * SPEED_FLOOR_BPS)
    fastest = max((bps for bps in rates_bps if bps is not None), default=0.0)
    return min(max(fastest, DEFAULT_CAP_BPS), HIGHEST_CAP_BPS)


def reliability(transfers: Transfers) -> float | None:
    """Return the score without Speed and Decay, 0 to 100; None for an unmeasured peer. A short record without failures
    has full Stability.
    """
    tried = transfers.good + transfers.bad
    if tried == 0:
        return None
    stability = 0.0 if transfers.failures_in_row > MAX_FAILURES_IN_ROW else STABILITY_WEIGHT
    return 100.0 * (SUCCESS_WEIGHT * transfers.good / tried + stability) / (SUCCESS_WEIGHT + STABILITY_WEIGHT)


def score(transfers: Transfers, now_s: float, cap_bps: float = DEFAULT_CAP_BPS) -> Score | None:
    """Return the peer's score at `now_s`; None for an unmeasured peer, for which the planner uses the median."""
    tried = transfers.good + transfers.bad
    if tried == 0 or transfers.last_s is None:
        return None
    speed = _speed(transfers.bps, cap_bps)
    success = 100.0 * transfers.good / tried
    stability = 0.0
    if transfers.failures_in_row <= MAX_FAILURES_IN_ROW:
        stability = 100.0 * min(transfers.good / STABLE_SUCCESSES, 1.0)
    idle_s = max(0.0, now_s - transfers.last_s)
    decay = 1.0 - min(idle_s / DECAY_WINDOW_S, MAX_DECAY)
    total = decay * (SPEED_WEIGHT * speed + SUCCESS_WEIGHT * success + STABILITY_WEIGHT * stability)
    return Score(total, speed, success, stability, decay)


def _speed(bps: float | None, cap_bps: float) -> float:
    if bps is None or bps <= SPEED_FLOOR_BPS:
        return 0.0
    return min(100.0, 100.0 * math.log10(bps / SPEED_FLOOR_BPS) / math.log10(cap_bps / SPEED_FLOOR_BPS))
