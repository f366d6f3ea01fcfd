"""Demotion of unreliable peers ("progressively deprioritized": ECHO-2, appendix C.3).

The planner itself handles a falling rate, because predicted times depend on rates. A score that falls at an unchanged
rate (failed transfers, a peer that keeps leaving) changes no predicted time, so it is handled here. At the first step
down, the peer no longer heads a chain; at the second, it feeds others only if no other peer can; at the third, it feeds
no peer. Each step takes SUSTAINED plannings in a row, and so does each step back. Scores are compared with the fleet's
median, so a fault that affects all peers demotes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from statistics import median
from typing import Final

from topology.plan_changes import GAMMA
from topology.slow_peers import SUSTAINED


class Standing(IntEnum):
    """The places in a plan that a peer may take; each step excludes more of them. `/status` and a metric show it."""

    HEAD = 0
    """Any place."""
    MIDDLE = 1
    """Any place except the head of a chain with peers behind it."""
    TAIL = 2
    """The end of a chain."""
    LEAF = 3
    """Receives and never forwards."""


STEPS: Final = (GAMMA, 1.25, 1.5)
"""A peer takes each step down when its reliability is below the fleet's median by this factor. With a long record and
other peers at 100 %, that means success ratios below 87 %, 71 % and 52 %.
"""

BACK: Final = 1.05
"""Factor by which reliability must exceed a step's threshold for the step to be reversed (hysteresis)."""


class Standings:
    """Each peer's standing. Deterministic; the only state is counts. Peers absent from a planning keep their standing
    until they are forgotten, because a flapping peer is absent from many plannings.
    """

    def __init__(self) -> None:
        self._steps: dict[str, Standing] = {}
        self._held: dict[str, int] = {}
        """Number of plannings in a row that ask for a step down (positive) or back (negative)."""

    def of(self, peer: str) -> Standing:
        return self._steps.get(peer, Standing.HEAD)

    @property
    def leaves(self) -> frozenset[str]:
        """The peers that must not feed other peers."""
        return frozenset(peer for peer, step in self._steps.items() if step is Standing.LEAF)

    def update(self, reliable: Mapping[str, float | None]) -> None:
        """Update for one planning. `reliable`: reliability (0 to 100) of each present peer; None if never measured."""
        known = [value for value in reliable.values() if value is not None]
        middle = median(known) if known else 0.0
        for peer, value in reliable.items():
            self._update_one(peer, 0 if value is None else _wanted(value, middle, self.of(peer)))

    def _update_one(self, peer: str, wanted: int) -> None:
        held = self._held.pop(peer, 0)
        held = held + wanted if held * wanted > 0 else wanted
        if abs(held) >= SUSTAINED:
            self._steps[peer] = Standing(self.of(peer) + wanted)
            if self._steps[peer] is Standing.HEAD:
                del self._steps[peer]
        elif held:
            self._held[peer] = held

    def forget(self, peer: str) -> None:
        self._steps.pop(peer, None)
        self._held.pop(peer, None)


def _wanted(value: float, middle: float, now: Standing) -> int:
    """Return 1 for a step down, -1 for a step back, or 0 for neither."""
    if now < Standing.LEAF and value * STEPS[now] < middle:
        return 1
    if now > Standing.HEAD and value * STEPS[now - 1] > middle * BACK:
        return -1
    return 0
