"""What a peer can take in and pass on (ECHO-2's B̂w), from what came through it.

A transfer is as slow as the slowest hop above it, so a rate alone says little: behind one slow peer all look slow. `settle` charges slowness where
it begins, to the first peer on a path that got less than its parent could have given it. Everybody else was held up from above, and is known to
manage at least what came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from topology.model import MIN_PEER_BPS, median_bps
from topology.rebuild import GAMMA
from topology.tree import ROOT, Plan

NEWEST_WEIGHT: Final = 0.5
"""Of the newest transfer that was a peer's own fault: a second in a row makes up three quarters of the estimate."""
PROBE: Final = 2.0
"""While nobody has been the narrowest hop, rates are bounded from below alone; planning with this many times the bound gives the hub's uplink to
fewer chains, until somebody is."""


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
    plan: Plan, rates: Mapping[str, Rate], samples: Mapping[str, tuple[float, float]], uplink_bps: float
) -> dict[str, Rate]:
    """The new rates of those that have a sample: (bytes, bits per second) of the same transfer, made over `plan`.

    A peer whose parent has no sample of as many bytes says nothing: what it could have had is unknown.
    """
    heads = max(1, sum(peer in samples for peer in plan.children(ROOT)))
    settled: dict[str, Rate] = {}
    for peer in plan.order:
        sample = samples.get(peer)
        if sample is None:
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


def assumed_bps(rates: Mapping[str, Rate]) -> dict[str, float | None]:
    """Each peer's rate for planning; None where nothing is known, which a planner takes for the median.

    One that is bounded from below alone is taken for the median of those known exactly, or its bound if that is more.
    """
    exact = [rate.bps for rate in rates.values() if rate.exact]
    middle = median_bps(exact) if exact else None
    return {peer: _assumed(rate, middle) for peer, rate in rates.items()}


def _assumed(rate: Rate, middle: float | None) -> float | None:
    if rate.bps is None:
        return None
    if rate.exact:
        return max(rate.bps, MIN_PEER_BPS)
    return max(rate.bps, middle) if middle is not None else PROBE * rate.bps
