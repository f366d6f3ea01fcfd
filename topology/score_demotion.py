"""Demotion of unreliable peers ("progressively deprioritized": ECHO-2, appendix C.3).

The planner handles a falling rate, because predicted times depend on rates. A falling score at an unchanged rate
(failed transfers, a peer that keeps leaving) changes no predicted time, so it counts here. First the peer heads no
chain. Then it feeds others only if no other peer can. Then it feeds no peer. Each step takes SUSTAINED plannings in a
row, and so does each step back. Scores are compared with the fleet's median, so a fault that affects all peers demotes
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from statistics import median
from typing import Final

from topology.plan_changes import GAMMA
from topology.slow_peers import SUSTAINED


class Standing(IntEnum):
    """The places in a plan that a peer may take; each step excludes one more. `/status` and a metric show it."""

    HEAD = 0
    """Any place."""
    MIDDLE = 1
    """Any place except the head of a chain with peers behind it."""
    TAIL = 2
    """The end of a chain."""
    LEAF = 3
    """Receives and never forwards."""


STEPS: Final = (GAMMA, 1.25, 1.5)
"""Factors below the fleet's median reliability at which each step down begins. With a long record these are success
ratios of 87 %, 71 % and 52 %, where the other peers have 100 %.
"""

BACK: Final = 1.05
"""Factor above the threshold of a step at which the step is reversed. Between the two nothing changes (hysteresis)."""


class Standings:
    """Each peer's standing. State is counts alone; deterministic. Peers absent from a planning keep their standing
    until they are forgotten, because a flapping peer is absent from many plannings.
    """

    def __init__(self) -> None:
        self._steps: dict[str, Standing] = {}
        self._held: dict[str, int] = {}
        """Number of plannings in a row that ask for a step down (above 0) or back (below 0)."""

    def of(self, peer: str) -> Standing:
        return self._steps.get(peer, Standing.HEAD)

    @property
    def leaves(self) -> frozenset[str]:
        """Peers that must feed no other peer."""
        return frozenset(peer for peer, step in self._steps.items() if step is Standing.LEAF)

    def update(self, reliable: Mapping[str, float | None]) -> None:
        """Update for one planning, with the reliability (0 to 100) of all present peers; None: never measured."""
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
    """1: a step down, -1: a step back, 0: neither."""
    if now < Standing.LEAF and value * STEPS[now] < middle:
        return 1
    if now > Standing.HEAD and value * STEPS[now - 1] > middle * BACK:
        return -1
    return 0
