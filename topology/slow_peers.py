"""Slow peers: which ones delay others, and how long it takes until the planner reacts. Pure.

Three reactions:

- `Patience`: the hub adopts a better plan only after several plannings in a row have found one.
- `Laggards`: a peer whose rate has been far too low for as many plannings is detached: it feeds no peer, and no peer
  waits for it. After as many plannings at a good rate, it returns.
- `Stragglers`: during a broadcast, a peer that falls behind its parent moves to a tail at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from topology.plan_changes import GAMMA
from topology.plan_tree import ROOT, Plan

SUSTAINED: Final = 3
"""Number of plannings in a row (there is one after each broadcast) before the planner reacts."""
HOPELESS: Final = 4.0
"""A peer whose rate is below the fleet's median by this factor cannot keep up in any plan."""
STRAGGLES: Final = 1.5
"""A peer straggles during a broadcast if its flow is below the fleet's median by this factor. Smaller differences are
left to the next planning, because a move costs a re-attachment.
"""
BEHIND_S: Final = 0.3
"""Least lag of a straggler behind its parent, in seconds at the median flow: more than a brief stall causes."""
SLOW_REPORTS: Final = 2
"""Number of slow reports in a row, at least a quarter of a second apart, before a peer straggles. The cause of a single
one may be a process that was not scheduled.
"""
SLOW_HEAD_REPORTS: Final = 6
"""The same for a head while the uplink is full: heads share the uplink, and for short times unevenly."""
FULL: Final = 0.9
"""Share of the uplink above which it counts as full."""
USUAL_S: Final = 0.25
"""Seconds for which a computed median flow is reused, because computing it takes a pass over all peers."""


@dataclass(slots=True)
class Patience:
    """Counts how many plannings in a row want a change."""

    held: int = 0

    def wanted(self, change: bool) -> bool:
        """Count one planning. Returns true, and starts again, once SUSTAINED in a row have wanted the change."""
        self.held = self.held + 1 if change else 0
        if self.held < SUSTAINED:
            return False
        self.held = 0
        return True


class Laggards:
    """The detached peers. Deterministic; the only other state is counts."""

    def __init__(self) -> None:
        self.detached: frozenset[str] = frozenset()
        self._held: dict[str, int] = {}

    def update(self, bps: Mapping[str, float | None]) -> frozenset[str]:
        """Update for one planning and return the detached peers. `bps`: every peer's rate; others are forgotten."""
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
    """Number of slow reports in a row."""


class Stragglers:
    """The flows of one broadcast, from the peers' reports: each peer's current receive rate, and how many bytes the
    peer is behind its parent.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._usual_bps = 0.0
        self._usual_at_s = -math.inf

    def begin(self) -> None:
        """Forget all flows: the broadcast of a new version begins."""
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
        """Record the report of a peer that receives from its parent in the plan, and return whether the peer delays
        others. A peer that receives nothing does not count, because it has lost its parent. `uplink_bps`: the hub's
        upload rate. `span_s`: the period of the report, a few round trips. A move costs about as much, so a peer moves
        only after it has delayed others for that long.
        """
        was = self._flows.get(peer)
        flow = self._flows[peer] = _Flow(bps, behind_bytes, 0 if was is None else was.slow)
        if now_s - self._usual_at_s >= USUAL_S:
            rates = [f.bps for f in self._flows.values() if f.bps > 0]
            self._usual_bps, self._usual_at_s = median(rates) if rates else 0.0, now_s
        if not 0 < bps * STRAGGLES < self._usual_bps:
            flow.slow = 0
            return False
        flow.slow += 1
        if not plan.children(peer) or flow.slow < SLOW_REPORTS:
            return False
        if plan.parent[peer] == ROOT and flow.slow < SLOW_HEAD_REPORTS and self._heads_bps(plan) > FULL * uplink_bps:
            return False
        return 8.0 * behind_bytes > max(BEHIND_S, span_s) * self._usual_bps

    def _heads_bps(self, plan: Plan) -> float:
        """Return the hub's total send rate to its heads; a head without a report counts with the median flow."""
        heads = (self._flows.get(head) for head in plan.children(ROOT))
        return sum(self._usual_bps if flow is None else flow.bps for flow in heads)
