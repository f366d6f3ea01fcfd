"""The rate at which a peer can receive and forward (ECHO-2's B̂w), estimated from its transfers.

A transfer is as slow as the slowest hop above it, so behind one slow peer all peers look slow. `update_rates` charges
slowness to the first peer on a path that received less than its parent could have sent. Every other peer was limited
from above; its observed rate is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from topology.broadcast_time import DEFAULT_PEER_BPS, MIN_PEER_BPS, median_bps
from topology.plan_changes import GAMMA
from topology.plan_tree import ROOT, Plan

NEWEST_WEIGHT: Final = 0.5
"""Weight of the newest transfer that the peer itself limited: two in a row make up three quarters of the estimate."""
PROBE: Final = 2.0
"""Factor on lower bounds while no peer's rate is known exactly. It gives the hub's uplink to fewer chains, until some
peer limits a transfer.
"""
PROBE_DEPTH: Final = 2
"""Greatest depth of a plan for such probing: in short chains one hop more costs little, and a star wastes the most."""


@dataclass(frozen=True, slots=True)
class PeerRate:
    """Bits per second, or None before the first transfer. `exact`: the peer itself limited a transfer; otherwise `bps`
    is a lower bound.
    """

    bps: float | None = None
    exact: bool = False

    def own(self, sample_bps: float) -> PeerRate:
        """The rate after a transfer that the peer itself limited."""
        if self.bps is None or not self.exact:
            return PeerRate(sample_bps, True)
        return PeerRate(self.bps + NEWEST_WEIGHT * (sample_bps - self.bps), True)

    def at_least(self, sample_bps: float) -> PeerRate:
        """The rate after a transfer that was limited above the peer."""
        return self if self.bps is not None and self.bps >= sample_bps else replace(self, bps=sample_bps)


def update_rates(
    plan: Plan,
    began: Plan,
    rates: Mapping[str, PeerRate],
    samples: Mapping[str, tuple[float, float]],
    uplink_bps: float,
) -> dict[str, PeerRate]:
    """New rates of the peers with a sample: (bytes, bits per second) of one transfer, which began over the plan `began`
    and ended over `plan`.

    Two kinds of samples are ignored. A peer that moved meanwhile is one, because the move cost time. A peer whose
    parent has no sample of as many bytes is the other, because the rate offered to it is unknown.
    """
    heads = max(1, len(plan.children(ROOT)))
    updated: dict[str, PeerRate] = {}
    for peer in plan.order:
        sample = samples.get(peer)
        if sample is None or began.parent.get(peer) != plan.parent[peer]:
            continue
        size, bps = sample
        above = plan.parent[peer]
        if above == ROOT:
            offered = uplink_bps / heads
        elif (there := samples.get(above)) is not None and there[0] == size:
            known = rates.get(above, PeerRate())
            sends = known.bps if known.bps is not None and known.exact else there[1]
            offered = min(there[1], max(sends, there[1]) / max(1, len(plan.children(above))))
        else:
            continue
        was = rates.get(peer, PeerRate())
        updated[peer] = was.own(bps) if bps * GAMMA < offered else was.at_least(bps)
    return updated


def assumed_bps(rates: Mapping[str, PeerRate], depth: int) -> dict[str, float | None]:
    """Each peer's rate for planning in bits/s; None where unknown, which the planner replaces by the median. `depth`:
    of the plan in force.

    A peer with only a lower bound counts with the median of the exact rates, or with its bound if that is more. Without
    any exact rate, `DEFAULT_PEER_BPS` replaces the median, and the bound is multiplied by PROBE up to PROBE_DEPTH.
    """
    exact = [rate.bps for rate in rates.values() if rate.exact]
    middle = median_bps(exact) if exact else None
    factor = PROBE if middle is None and depth <= PROBE_DEPTH else 1.0
    return {
        peer: _assumed(rate, DEFAULT_PEER_BPS if middle is None else middle, factor) for peer, rate in rates.items()
    }


def slowest_bps(rates: Iterable[PeerRate]) -> float | None:
    """The slowest peer's rate in bits/s, by what is certain of it; None if one is unknown, or without peers."""
    known = [rate.bps for rate in rates]
    return min((bps for bps in known if bps is not None), default=None) if None not in known else None


def _assumed(rate: PeerRate, middle: float, factor: float) -> float | None:
    if rate.bps is None:
        return None
    return max(rate.bps, MIN_PEER_BPS) if rate.exact else max(rate.bps * factor, middle)
