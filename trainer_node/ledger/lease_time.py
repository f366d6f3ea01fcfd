"""How long a lease lasts: a multiple of the median completion of the same task and worker class. Pure.

Source: SparrowRL, section 5.4: two to three times the median. A lease that expires says that the job takes at least so
long, so it enters the median as a lower bound. Otherwise slow jobs would never complete within their lease, never
lengthen it, and be repeated for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

FACTOR = 2.5
LEAST_S = 5.0
GUESS_S = 120.0
"""Of first leases, unless the run states another."""
KEPT = 64
"""Completions in a median."""
RECORD_S = 1.0
"""A process that dies loses at most so much of the time that has run."""


class Completions:
    """Completion times of one task on one class of workers."""

    def __init__(self, guess_s: float = GUESS_S, *, factor: float = FACTOR, least_s: float = LEAST_S) -> None:
        self._guess_s, self._factor, self._least_s = guess_s, factor, least_s
        self._seconds: deque[tuple[float, bool]] = deque(maxlen=KEPT)

    def completed(self, seconds: float) -> None:
        self._seconds.append((seconds, True))

    def expired(self, seconds: float) -> None:
        """Record a lease that ended after ``seconds`` without a result."""
        self._seconds.append((seconds, False))

    def median_s(self) -> float | None:
        """The median of all completions, those that are only known to take longer included (Kaplan-Meier's estimate of
        it); the longest known time when more than half of all took longer. None before the first.
        """
        if not self._seconds:
            return None
        survival, at_risk = 1.0, len(self._seconds)
        for seconds, complete in sorted(self._seconds, key=lambda each: (each[0], not each[1])):
            if complete:
                survival *= 1 - 1 / at_risk
                if survival <= 0.5:
                    return seconds
            at_risk -= 1
        return max(seconds for seconds, _ in self._seconds)

    def lease_s(self) -> float:
        median = self.median_s()
        return max(self._least_s, self._guess_s if median is None else self._factor * median)


def latest_s(max_tokens: int, slowest_tokens_s: float, lease_s: float) -> float:
    """Return the maximum duration of a lease in seconds: the time to sample the longest sample's tokens at the slowest
    rate observed.
    """
    return max(lease_s, max_tokens / slowest_tokens_s) if slowest_tokens_s > 0 else lease_s


class LedgerClock:
    """The ledger's own time: seconds that it has run, all its processes together. ``source``: seconds from any origin;
    a step back counts as no time. ``ran_s``: seconds that earlier processes ran.

    Leases are measured in this time. A wall clock that jumps neither ends leases nor prolongs them. The time between
    two processes of the ledger counts for no lease: workers could not have reached the ledger then.
    """

    def __init__(self, source: Callable[[], float], ran_s: float) -> None:
        self._source = source
        self._ran_s = ran_s
        self._last_s = source()

    def now_s(self) -> float:
        source_s = self._source()
        self._ran_s += max(0.0, source_s - self._last_s)
        self._last_s = source_s
        return self._ran_s
