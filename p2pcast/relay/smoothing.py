"""How fast a relay may pass on what comes in: not much faster than it came. Pure.

Over a long way things come in bursts: where one packet is lost, all behind it waits a round trip, and is there at once. Passed on as fast as can be, a burst is lost at
the next narrow link, whose queue holds less than a round trip's worth; so each hop loses more than the one above it. The kernel does not see to it: BBR ends its search for
a way's rate, in which it sends at almost three times what it has found, only where there is always something to send. A relay has what comes.
"""

from __future__ import annotations

from collections import deque
from typing import Final

HEADROOM: Final = 1.25
"""Times the rate at which things come in: what was held up has to catch up, too."""
SHORTEST_S: Final = 0.25
"""What came in less time says more of round trips than of rates."""
KEPT: Final = 16
"""Artifacts that are remembered."""
FAR_BEHIND_S: Final = 1.0
"""A child that lacks more than comes in during this is no victim of bursts, it catches up: as fast as it goes."""
UNHELD_BYTES_S: Final = 1 << 40
"""More than any link carries: what a connection takes for no limit, without beginning anew."""


class Inflow:
    """How fast whole artifacts have come in here: over all of each, since the fastest moment of one is the end of a burst."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=KEPT)

    def came(self, count: int, took_s: float) -> None:
        """All of an artifact of so many bytes."""
        if took_s >= SHORTEST_S:
            self._rates.append(count / took_s)

    def most_bytes_s(self, waiting_bytes: int) -> int | None:
        """At which a connection to a child may be sent to for which so much waits here; None while nothing is known."""
        if not self._rates:
            return None
        bytes_s = max(self._rates)
        return UNHELD_BYTES_S if waiting_bytes > FAR_BEHIND_S * bytes_s else int(HEADROOM * bytes_s)
