"""Slow is not dead: who holds others up, who is hopeless, and how long either has to last before it counts.

Three speeds of answer, all pure. `Patience`: a better plan is taken once it has been better for several plannings in a row. `Laggards`: a peer
whose rate has been hopeless for as long is detached (it feeds nobody, nobody waits for it), and put back when it has recovered for as long.
`Stragglers`: in the middle of a broadcast, a peer that falls behind a parent that is ahead is taken out of the way at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from topology.rebuild import GAMMA
from topology.tree import ROOT, Plan

SUSTAINED: Final = 3
"""Plannings in a row, one after each broadcast."""
HOPELESS: Final = 4.0
"""Below the fleet's median by this factor, a peer could not keep up with the others even if they waited."""
STRAGGLES: Final = 1.5
"""In mid-broadcast: below the fleet's median flow by this factor. Less is left to the next planning: moving costs a re-attachment."""
BEHIND_S: Final = 0.3
"""And behind its parent by what flows in this time: so much does not gather in one hiccup, and a hop's own length is far below it."""
HEAD_LOOKS: Final = 2
"""Reports in a row for a head, to whom the hub is always ahead: when the uplink itself falters, the first to report must not be taken for slow."""
USUAL_S: Final = 0.25
"""How long the fleet's median is taken for still true: it takes a look at everybody."""


@dataclass(slots=True)
class Patience:
    """Counts how long a change has been wanted."""

    held: int = 0

    def wanted(self, change: bool) -> bool:
        """One planning. True when the change has been wanted often enough in a row; then counting starts anew."""
        self.held = self.held + 1 if change else 0
        if self.held < SUSTAINED:
            return False
        self.held = 0
        return True


class Laggards:
    """Who is detached. Deterministic; state is counts alone."""

    def __init__(self) -> None:
        self.detached: frozenset[str] = frozenset()
        self._held: dict[str, int] = {}

    def look(self, bps: Mapping[str, float | None]) -> frozenset[str]:
        """One planning, with everybody's rate; who is detached after it. Ids that are not here are forgotten."""
        known = [rate for rate in bps.values() if rate is not None]
        middle = median(known) if known else 0.0
        held: dict[str, int] = {}
        detached = set(self.detached & bps.keys())
        for peer, rate in bps.items():
            inside = peer in detached
            if rate is None or not (rate * GAMMA >= middle if inside else rate * HOPELESS < middle):
                continue
            held[peer] = self._held.get(peer, 0) + 1
            if held[peer] >= SUSTAINED:
                del held[peer]
                detached ^= {peer}
        self._held, self.detached = held, frozenset(detached)
        return self.detached


@dataclass(slots=True)
class _Flow:
    at_s: float
    got_bytes: int
    parent: str
    base_bytes: int | None = None
    """At the beginning of the version; None for who was first heard after it, and is left alone until the next."""
    bps: float | None = None
    slow: int = 0
    """Reports in a row."""


class Stragglers:
    """One broadcast's flows, from peers' counts of bytes received. Counts only ever grow, and are of a peer's whole life."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._usual_bps = 0.0
        self._usual_at_s = -math.inf

    def begin(self) -> None:
        """A version begins."""
        for flow in self._flows.values():
            flow.base_bytes, flow.bps, flow.slow = flow.got_bytes, None, 0

    def forget(self, peer: str) -> None:
        self._flows.pop(peer, None)

    def heard(self, peer: str, parent: str, now_s: float, received_bytes: int) -> None:
        """A report of one that is fed by `parent`. Who changed parents since the last lost time on the way: its rate is unknown until the next."""
        flow = self._flows.get(peer)
        if flow is None or received_bytes < flow.got_bytes:
            self._flows[peer] = _Flow(now_s, received_bytes, parent)
        elif now_s > flow.at_s:
            same = flow.parent == parent
            flow.bps = 8.0 * (received_bytes - flow.got_bytes) / (now_s - flow.at_s) if same else None
            flow.at_s, flow.got_bytes, flow.parent = now_s, received_bytes, parent

    def found(self, plan: Plan, peer: str, now_s: float, flowing: Collection[str]) -> float | None:
        """Whether `peer`, which has just reported, holds others up: then its rate in bits/s. `flowing`: who has not all of the version yet."""
        if peer not in flowing:
            return None
        if now_s - self._usual_at_s >= USUAL_S:
            rates = [bps for p in flowing if (f := self._flows.get(p)) is not None and (bps := f.bps) is not None and bps > 0]
            self._usual_bps, self._usual_at_s = median(rates) if rates else 0.0, now_s
        return self._flows[peer].bps if self._usual_bps > 0 and self._straggles(plan, peer, self._usual_bps) else None

    def _straggles(self, plan: Plan, peer: str, usual_bps: float) -> bool:
        flow = self._flows.get(peer)
        if flow is None or flow.bps is None or flow.base_bytes is None or peer not in plan:
            return False
        if flow.bps * STRAGGLES >= usual_bps:
            flow.slow = 0
            return False
        flow.slow += 1
        if not plan.children(peer) or (plan.parent[peer] == ROOT and flow.slow < HEAD_LOOKS):
            return False
        return 8.0 * self._ahead(plan.parent[peer], flow.got_bytes - flow.base_bytes) > BEHIND_S * usual_bps

    def _ahead(self, parent: str, got_bytes: int) -> float:
        """Bytes of the version that the parent had by its last report, beyond these; of a parent that has not reported, none."""
        if parent == ROOT:
            return math.inf
        above = self._flows.get(parent)
        return 0.0 if above is None or above.base_bytes is None else above.got_bytes - above.base_bytes - got_bytes
