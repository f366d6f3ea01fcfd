"""What a peer can take in and pass on (ECHO-2's B̂w), from what came through it.

A transfer is as slow as the slowest hop above it, so a rate alone says little: behind one slow peer all look slow. `settle` charges slowness where
it begins, to the first peer on a path that got less than its parent could have given it. Everybody else was held up from above, and is known to
manage at least what came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from topology.model import DEFAULT_PEER_BPS, MIN_PEER_BPS, median_bps
from topology.rebuild import GAMMA
from topology.tree import ROOT, Plan

NEWEST_WEIGHT: Final = 0.5
"""Of the newest transfer that was a peer's own fault: a second in a row makes up three quarters of the estimate."""
PROBE: Final = 2.0
"""While nobody has been the narrowest hop, rates are bounded from below alone; planning with this many times the bound gives the hub's uplink to
fewer chains, until somebody is."""
PROBE_DEPTH: Final = 2
"""That is worth finding out where chains are so short at most: a hop more costs little there, and a star wastes the most."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bits per second, or None before the first transfer. `exact`: the peer itself has been the narrowest hop; else it manages this at least."""

    bps: float | None = None
    exact: bool = False

    def own(self, sample_bps: float) -> Rate:
        """It got no more although more was there."""
        if self.bps is None or not self.exact:
            return Rate(sample_bps, True)
        return Rate(self.bps + NEWEST_WEIGHT * (sample_bps - self.bps), True)

    def at_least(self, sample_bps: float) -> Rate:
        """It got all that was there."""
        return self if self.bps is not None and self.bps >= sample_bps else replace(self, bps=sample_bps)


def settle(
    plan: Plan, began: Plan, rates: Mapping[str, Rate], samples: Mapping[str, tuple[float, float]], uplink_bps: float
) -> dict[str, Rate]:
    """The new rates of those that have a sample: (bytes, bits per second) of the same transfer, that began over the
    plan `began` and ended over `plan`.

    One that has been moved meanwhile says nothing: it lost time on the way. A peer whose parent has no sample of as many bytes says nothing: what it could have had is unknown.
    """
    heads = max(1, len(plan.children(ROOT)))
    settled: dict[str, Rate] = {}
    for peer in plan.order:
        sample = samples.get(peer)
        if sample is None or began.parent.get(peer) != plan.parent[peer]:
            continue
        size, bps = sample
        above = plan.parent[peer]
        if above == ROOT:
            offered = uplink_bps / heads
        elif (there := samples.get(above)) is not None and there[0] == size:
            known = rates.get(above, Rate())
            sends = known.bps if known.bps is not None and known.exact else there[1]
            offered = min(there[1], max(sends, there[1]) / max(1, len(plan.children(above))))
        else:
            continue
        was = rates.get(peer, Rate())
        settled[peer] = was.own(bps) if bps * GAMMA < offered else was.at_least(bps)
    return settled


def assumed_bps(rates: Mapping[str, Rate], depth: int) -> dict[str, float | None]:
    """Each peer's rate for planning; None where nothing is known, which a planner takes for the median. `depth`: of the plan in force.

    One that is bounded from below alone is taken for the median of those known exactly, or its bound if that is more. While nobody is known
    exactly, `DEFAULT_PEER_BPS` stands for the median, and a multiple for the bound where finding out is cheap.
    """
    exact = [rate.bps for rate in rates.values() if rate.exact]
    middle = median_bps(exact) if exact else None
    factor = PROBE if middle is None and depth <= PROBE_DEPTH else 1.0
    return {peer: _assumed(rate, DEFAULT_PEER_BPS if middle is None else middle, factor) for peer, rate in rates.items()}


def _assumed(rate: Rate, middle: float, factor: float) -> float | None:
    if rate.bps is None:
        return None
    return max(rate.bps, MIN_PEER_BPS) if rate.exact else max(rate.bps * factor, middle)
