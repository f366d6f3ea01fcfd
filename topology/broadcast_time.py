"""A model of broadcast times, used to compare plans.

Every peer stores a piece and then forwards it, so a chain is a pipeline. With equal pieces of s bytes, hops of rate
r_1 … r_k and a payload P, the last peer is done after

    (P - s) / min r  +  sum over hops (s / r_i + rtt_i / 2)

which is exact for such a pipeline. `BroadcastNetwork.hop_s` is added to each half of a round trip. In a tree, the
children of a sender share its rate max-min fairly: what a child leaves of its equal share goes to the others. The model
assumes that a peer can receive at its own rate and send at the same rate at the same time.

Rates are in bits per second, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from topology.plan_tree import ROOT, Plan, PlanError, PlanMember, by_id

DEFAULT_PEER_BPS: Final = 100e6
"""Rate assumed if no peer has been measured: the per-worker cap in ECHO-2's experiments (section 5.5.1)."""
MIN_PEER_BPS: Final = 8e3
"""Lowest rate in predictions (1 kB/s), so that every time is finite. A score's Speed is 0 at about this rate."""
TYPICAL_PAYLOAD_BYTES: Final = 64 << 20
"""About one step's delta of an 8B model."""


@dataclass(frozen=True, slots=True)
class BroadcastNetwork:
    """The model's assumptions about links: piece size, and round-trip times inside a region and between regions."""

    piece_bytes: int = 64 << 10
    near_rtt_s: float = 0.005
    far_rtt_s: float = 0.1
    root_region: str = ""
    hop_s: float = 0.0
    """Seconds that a peer needs to forward a piece, in addition to the transfer: scheduling and verification."""

    def rtt_s(self, a: str, b: str) -> float:
        """Round-trip time in seconds between two regions, by label."""
        return self.near_rtt_s if a == b else self.far_rtt_s


DEFAULT_NETWORK: Final = BroadcastNetwork()


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted broadcast. `stretch`: the largest ratio of a peer's time to its floor, the payload's time at
    the peer's own rate or the fleet's median, whichever is lower. `flows`: each peer's lowest rate on its path in
    bits/s, and the delay of all hops in seconds. `waits`: each peer's time multiplied by its floor's rate, in bits.
    """

    times_s: Mapping[str, float]
    last_s: float
    stretch: float
    flows: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)

    @property
    def cost_s(self) -> float:
        """The figure by which plans are compared. With equal peers, it is proportional to `last_s`. If one peer is so
        slow that it is last in any plan, `last_s` hides how long the others wait for it; `stretch` shows that.
        """
        return math.sqrt(self.last_s * self.stretch)


def median_bps(rates_bps: Iterable[float | None]) -> float:
    """Return the median of the known rates in bits/s, or `DEFAULT_PEER_BPS` if none is known."""
    known = [max(rate, MIN_PEER_BPS) for rate in rates_bps if rate is not None]
    return median(known) if known else DEFAULT_PEER_BPS


def member_rates(members: Mapping[str, PlanMember]) -> dict[str, float]:
    """Return each member's rate in bits/s, with the median in place of unknown rates."""
    middle = median_bps(m.bps for m in members.values())
    return {id_: middle if m.bps is None else max(m.bps, MIN_PEER_BPS) for id_, m in members.items()}


def number_of_chains(uplink_bps: float, peer_bps: Iterable[float | None], n: int) -> int:
    """Return how many chains the hub's uplink can feed at a peer's full rate: floor(uplink / median peer rate), limited
    to 1…n (0 if n is 0).

    See ECHO-2, section 4.2 and appendix C.3. Raises PlanError if the uplink is not above 0.
    """
    if not uplink_bps > 0:
        raise PlanError(f"uplink of {uplink_bps!r} bits/s: it must be above 0")
    ratio = uplink_bps / median_bps(peer_bps)
    return min(n, max(1, int(min(ratio, float(n)))))


def ideal_s(payload_bytes: float, peer_bps: float) -> float:
    """Return the seconds that the payload takes at the peer's own rate: a lower bound for any plan."""
    return 8.0 * payload_bytes / peer_bps


def chain_times_s(
    payload_bytes: float, rates_bps: Sequence[float], piece_bytes: float, rtts_s: Sequence[float]
) -> list[float]:
    """Return the seconds until each peer of one chain has the payload. `rates_bps` and `rtts_s` have one entry per hop,
    starting at the hub. Raises ValueError if their lengths differ.
    """
    piece = min(piece_bytes, payload_bytes)
    slowest, hops_s = float("inf"), 0.0
    times_s: list[float] = []
    for rate, rtt in zip(rates_bps, rtts_s, strict=True):
        slowest = min(slowest, rate)
        hops_s += 8.0 * piece / rate + rtt / 2
        times_s.append(8.0 * (payload_bytes - piece) / slowest + hops_s)
    return times_s


def chain_time_s(
    payload_bytes: float, rates_bps: Sequence[float], piece_bytes: float, rtts_s: Sequence[float]
) -> float:
    """Return the seconds until the last peer of a chain has the payload (0 if the chain is empty)."""
    return max(chain_times_s(payload_bytes, rates_bps, piece_bytes, rtts_s), default=0.0)


def fair_shares(capacity: float, demands: Sequence[float]) -> list[float]:
    """Return max-min fair shares of `capacity`: no share exceeds its demand, and what is left goes to the others."""
    shares = [0.0] * len(demands)
    left, waiting = capacity, len(demands)
    for index in sorted(range(len(demands)), key=lambda i: (demands[i], i)):
        shares[index] = min(demands[index], left / waiting)
        left -= shares[index]
        waiting -= 1
    return shares


def predict(
    plan: Plan,
    members: Iterable[PlanMember],
    payload_bytes: float,
    uplink_bps: float,
    network: BroadcastNetwork = DEFAULT_NETWORK,
) -> Prediction:
    """Predict the broadcast of `payload_bytes` over a plan.

    Raises PlanError if a peer of the plan is not among the members.
    """
    table = by_id(members)
    if strangers := plan.parent.keys() - table.keys():
        raise PlanError(f"peer {min(strangers)!r} is in the plan but not among the members")
    return predict_at(plan, table, member_rates(table), payload_bytes, uplink_bps, network)


def predict_at(
    plan: Plan,
    table: Mapping[str, PlanMember],
    rates: Mapping[str, float],
    payload_bytes: float,
    uplink_bps: float,
    network: BroadcastNetwork = DEFAULT_NETWORK,
    before: tuple[Plan, Prediction] | None = None,
    middle_bps: float | None = None,
) -> Prediction:
    """Like `predict`, with members and rates given by id. Takes one pass, about a microsecond per peer. `before`: a
    different plan of the same peers and its prediction; if given, only the subtrees that differ are examined.
    `middle_bps`: the median of `rates`, if it has been computed already.
    """
    middle = (median(rates.values()) if rates else DEFAULT_PEER_BPS) if middle_bps is None else middle_bps
    piece_bits = 8.0 * min(network.piece_bytes, payload_bytes)
    rest_bits = 8.0 * payload_bytes - piece_bits
    payload_bits = 8.0 * payload_bytes
    near_s, far_s = network.near_rtt_s / 2 + network.hop_s, network.far_rtt_s / 2 + network.hop_s
    flows: dict[str, tuple[float, float]] = {} if before is None else dict(before[1].flows)
    times_s: dict[str, float] = {} if before is None else dict(before[1].times_s)
    waits: dict[str, float] = {} if before is None else dict(before[1].waits)
    due = {0: [ROOT]} if before is None else _changed_senders(before[0], plan)
    feeds = plan.feeds
    level: list[str] = []
    depth = 0
    while level or due:
        if not level:
            depth = min(due)
        if depth in due:
            level = list(dict.fromkeys((*level, *due.pop(depth))))
        affected: list[str] = []
        for sender in level:
            if sender not in feeds or not (below := feeds[sender]):
                continue
            if sender == ROOT:
                region, capacity, slowest, hops_s = network.root_region, uplink_bps, math.inf, 0.0
            else:
                region, capacity = table[sender].region, rates[sender]
                slowest, hops_s = flows[sender]
            if len(below) == 1:
                rate = rates[below[0]]
                shares = [rate if rate < capacity else capacity]
            else:
                shares = fair_shares(capacity, [rates[child] for child in below])
            for child, share in zip(below, shares, strict=True):
                narrow = share if share < slowest else slowest
                hops = hops_s + piece_bits / share + (near_s if table[child].region == region else far_s)
                if before is None or flows.get(child) != (narrow, hops):
                    rate = rates[child]
                    flows[child] = narrow, hops
                    times_s[child] = time_s = rest_bits / narrow + hops
                    waits[child] = time_s * (rate if rate < middle else middle)
                    affected.append(child)
        level = affected
        depth += 1
    stretch = max(1.0, max(waits.values(), default=0.0) / payload_bits) if payload_bits > 0 else 1.0
    return Prediction(times_s, max(times_s.values(), default=0.0), stretch, flows, waits)


def _changed_senders(old: Plan, new: Plan) -> dict[int, list[str]]:
    """Return the peers (and ROOT) whose children have changed, by their depth in the new plan."""
    known = old.parent
    moved = [peer for peer, above in new.parent.items() if known.get(peer) != above]
    senders = {new.parent[peer] for peer in moved} | {known[peer] for peer in moved if peer in known}
    by_depth: dict[int, list[str]] = {}
    for sender in sorted(senders):
        by_depth.setdefault(new.depth_of(sender), []).append(sender)
    return by_depth


def time_to_last_s(
    plan: Plan,
    members: Iterable[PlanMember],
    payload_bytes: float,
    uplink_bps: float,
    network: BroadcastNetwork = DEFAULT_NETWORK,
) -> float:
    """Return the predicted seconds until every peer has the payload; see `predict`."""
    return predict(plan, members, payload_bytes, uplink_bps, network).last_s
