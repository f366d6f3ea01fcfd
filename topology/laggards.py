"""Slow is not dead: who holds others up, who is hopeless, and how long either has to last before it counts.

Three speeds of answer, all pure. `Patience`: a better plan is taken once it has been better for several plannings in a row. `Laggards`: a peer
whose rate has been hopeless for as long is detached (it feeds nobody, nobody waits for it), and put back when it has recovered for as long.
`Stragglers`: in the middle of a broadcast, a peer that falls behind a parent that is ahead is taken out of the way at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
"""And behind its parent by what flows in this time, at least: so much does not gather in one hiccup, and the length of a short hop is far below it."""
LOOKS: Final = 2
"""Reports in a row, a quarter of a second apart at least: a process that was not scheduled for a while has not become slow."""
HEAD_LOOKS: Final = 6
"""For a head while the uplink is full: heads share it, for a moment not evenly."""
FULL: Final = 0.9
"""Share of the uplink above which that may be so."""
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
    bps: float
    behind_bytes: int
    slow: int = 0
    """Reports in a row."""


class Stragglers:
    """One broadcast's flows, as peers tell of them: at what rate each receives just now, and how much its parent has that it lacks."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._usual_bps = 0.0
        self._usual_at_s = -math.inf

    def begin(self) -> None:
        """A version begins."""
        self._flows.clear()
        self._usual_at_s = -math.inf

    def forget(self, peer: str) -> None:
        self._flows.pop(peer, None)

    def found(
        self,
        plan: Plan,
        peer: str,
        now_s: float,
        bps: float,
        behind_bytes: int,
        uplink_bps: float = math.inf,
        span_s: float = 0.0,
    ) -> bool:
        """A report of one that receives from its parent in the plan: whether it holds others up. Who gets nothing at all does not: it has lost its parent.
        `uplink_bps`: the hub's; `span_s`: of how long it tells, some round trips, which to be moved takes as well. So nobody is moved before it has cost as much as a move."""
        was = self._flows.get(peer)
        flow = self._flows[peer] = _Flow(bps, behind_bytes, 0 if was is None else was.slow)
        if now_s - self._usual_at_s >= USUAL_S:
            rates = [f.bps for f in self._flows.values() if f.bps > 0]
            self._usual_bps, self._usual_at_s = median(rates) if rates else 0.0, now_s
        if not 0 < bps * STRAGGLES < self._usual_bps:
            flow.slow = 0
            return False
        flow.slow += 1
        if not plan.children(peer) or flow.slow < LOOKS:
            return False
        if plan.parent[peer] == ROOT and flow.slow < HEAD_LOOKS and self._heads_bps(plan) > FULL * uplink_bps:
            return False
        return 8.0 * behind_bytes > max(BEHIND_S, span_s) * self._usual_bps

    def _heads_bps(self, plan: Plan) -> float:
        """What the hub sends; of heads that have not told, the usual."""
        heads = (self._flows.get(head) for head in plan.children(ROOT))
        return sum(self._usual_bps if flow is None else flow.bps for flow in heads)
