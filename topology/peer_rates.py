"""The rate at which a peer can receive and forward (ECHO-2's B̂w), estimated from its transfers.

A transfer is as slow as the slowest hop on its path, so all peers behind one slow peer look slow. `update_rates`
attributes the slowness to the first peer on a path that received less than its parent could have sent. Every other peer
was limited by a peer above it, so its observed rate is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from topology.broadcast_time import DEFAULT_PEER_BPS, MIN_PEER_BPS, median_bps
from topology.plan_changes import GAMMA
from topology.plan_tree import ROOT, Plan

NEWEST_WEIGHT: Final = 0.5
"""Weight of the newest transfer that the peer itself limited: the last two make up three quarters of the estimate."""
PROBE: Final = 2.0
"""Factor by which lower bounds are raised while no peer's rate is known exactly. With it, the hub feeds fewer chains
until some peer limits a transfer.
"""
PROBE_DEPTH: Final = 2
"""Greatest depth at which lower bounds are raised: in short chains one more hop costs little, a star wastes most."""


@dataclass(frozen=True, slots=True)
class PeerRate:
    """A peer's rate in bits per second; None before the first transfer. `exact`: the peer itself has limited a
    transfer; otherwise `bps` is a lower bound.
    """

    bps: float | None = None
    exact: bool = False

    def own(self, sample_bps: float) -> PeerRate:
        """Return the rate after a transfer that the peer itself limited."""
        if self.bps is None or not self.exact:
            return PeerRate(sample_bps, True)
        return PeerRate(self.bps + NEWEST_WEIGHT * (sample_bps - self.bps), True)

    def at_least(self, sample_bps: float) -> PeerRate:
        """Return the rate after a transfer that was limited above the peer."""
        return self if self.bps is not None and self.bps >= sample_bps else replace(self, bps=sample_bps)


def update_rates(
    plan: Plan,
    began: Plan,
    rates: Mapping[str, PeerRate],
    samples: Mapping[str, tuple[float, float]],
    uplink_bps: float,
) -> dict[str, PeerRate]:
    """Return the new rates of the peers whose samples count. A sample is the (bytes, bits per second) of one transfer,
    which began under the plan `began` and ended under `plan`.

    A sample is ignored if the peer moved during the transfer, because the move took time. It is also ignored if the
    parent has no sample of the same size, because then the rate offered to the peer is unknown.
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
    """Return each peer's rate for planning in bits/s; None if it is unknown (the planner then uses the median).
    `depth`: the depth of the plan in force.

    A peer with only a lower bound gets the median of the exact rates, or its bound if that is higher. If no rate is
    exact, `DEFAULT_PEER_BPS` replaces the median, and up to PROBE_DEPTH the bound is multiplied by PROBE.
    """
    exact = [rate.bps for rate in rates.values() if rate.exact]
    middle = median_bps(exact) if exact else None
    factor = PROBE if middle is None and depth <= PROBE_DEPTH else 1.0
    return {
        peer: _assumed(rate, DEFAULT_PEER_BPS if middle is None else middle, factor) for peer, rate in rates.items()
    }


def slowest_bps(rates: Iterable[PeerRate]) -> float | None:
    """Return the lowest rate or lower bound of any peer in bits/s; None if one is unknown or there are no peers."""
    known = [rate.bps for rate in rates]
    return min((bps for bps in known if bps is not None), default=None) if None not in known else None


def _assumed(rate: PeerRate, middle: float, factor: float) -> float | None:
    if rate.bps is None:
        return None
    return max(rate.bps, MIN_PEER_BPS) if rate.exact else max(rate.bps * factor, middle)
