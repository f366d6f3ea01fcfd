"""The ledger's own time: seconds that it has run, all its processes together. Pure.

Leases are measured in this time. A wall clock that jumps neither ends leases nor prolongs them. The time between two
processes of the ledger counts for no lease: workers could not have reached the ledger then.
"""

from __future__ import annotations

from collections.abc import Callable

RECORD_S = 1.0
"""A process that dies loses at most so much of the time that has run."""


class LedgerClock:
    """``source``: seconds from any origin; a step back counts as no time. ``ran_s``: seconds that earlier processes
    ran.
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
