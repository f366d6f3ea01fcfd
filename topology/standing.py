"""How far a peer is trusted with others, by how reliably it takes part: ECHO-2, appendix C.3, "progressively deprioritized".

The planner handles a falling rate, since predicted times change with it. A score that falls at an unchanged rate (transfers that fail, a peer that comes and goes) changes no predicted time, so
it counts here: first the peer heads no chain, then it feeds others only if no other peer would, then it feeds no peer. Each step takes SUSTAINED plannings in a row, and so does each step back.
Scores are compared with the fleet's median, so a fault that affects all (a network that fails for a minute) costs no peer its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from statistics import median
from typing import Final

from topology.laggards import SUSTAINED
from topology.rebuild import GAMMA


class Standing(IntEnum):
    """The places that a peer may take: each step takes one away."""

    HEAD = 0
    """Anything."""
    MIDDLE = 1
    """No head of a chain that has others behind it."""
    TAIL = 2
    """The end of a chain."""
    LEAF = 3
    """It receives, and never forwards."""


STEPS: Final = (GAMMA, 1.25, 1.5)
"""Below the fleet's median reliability by these factors. With a long record that is a success ratio of 87 %, 71 % and 52 % where the others' is 100 %."""

BACK: Final = 1.05
"""Above the border of a step by this factor it is taken back: in between nothing moves."""


class Standings:
    """State is counts alone; deterministic. Peers that are not asked about keep their standing until they are forgotten: one that flaps is away at many plannings."""

    def __init__(self) -> None:
        self._steps: dict[str, Standing] = {}
        self._held: dict[str, int] = {}
        """Plannings in a row that wanted a step down (above 0) or back (below 0)."""

    def of(self, peer: str) -> Standing:
        return self._steps.get(peer, Standing.HEAD)

    @property
    def leaves(self) -> frozenset[str]:
        """Peers that are to feed no other peer."""
        return frozenset(peer for peer, step in self._steps.items() if step is Standing.LEAF)

    def look(self, reliable: Mapping[str, float | None]) -> None:
        """One planning, with the reliability (0 to 100) of everybody that is there; None: never measured."""
        known = [value for value in reliable.values() if value is not None]
        middle = median(known) if known else 0.0
        for peer, value in reliable.items():
            self._look(peer, 0 if value is None else _wanted(value, middle, self.of(peer)))

    def _look(self, peer: str, wanted: int) -> None:
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
