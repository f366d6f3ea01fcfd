"""How long a broadcast takes: the model by which plans are compared.

Every peer stores a piece and forwards it, so a chain is a pipeline of stages in a row. With equal pieces of s bytes, hops of rate r_1 … r_k and
a payload P, the last peer is done after

    (P - s) / min r  +  sum over hops (s / r_i + rtt_i / 2)

which is exact for such a pipeline; `Network.hop_s` is added to each half of a round trip. In a tree each sender's rate is shared among those it feeds, fairly: who wants less than an equal share
leaves the rest to the others. A peer is taken to receive and to send at up to its own rate, each.

Rates are in bits per second, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from topology.tree import ROOT, Member, Plan, PlanError, by_id

DEFAULT_PEER_BPS: Final = 100e6
"""Taken for a fleet of which nothing has been measured: the per-worker cap of ECHO-2's experiments (section 5.5.1)."""
MIN_PEER_BPS: Final = 8e3
"""1 kB/s: near where a score's Speed is 0. Slower is not told apart, which keeps every time finite."""
TYPICAL_PAYLOAD_BYTES: Final = 64 << 20
"""About one step's delta of an 8B model."""


@dataclass(frozen=True, slots=True)
class Network:
    """What the model assumes about links: the piece, and the round trip inside a region and between two."""

    piece_bytes: int = 64 << 10
    near_rtt_s: float = 0.005
    far_rtt_s: float = 0.1
    root_region: str = ""
    hop_s: float = 0.0
    """What a peer takes, beside a piece's own time, until it passes it on: to be scheduled, to check it."""

    def rtt_s(self, a: str, b: str) -> float:
        """Round trip between two regions, by label."""
        return self.near_rtt_s if a == b else self.far_rtt_s


DEFAULT_NETWORK: Final = Network()


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted broadcast. `stretch` is the largest ratio of a peer's time to its floor: the payload at its own rate or the fleet's
    median, whichever is less."""

    times_s: Mapping[str, float]
    last_s: float
    stretch: float

    @property
    def cost_s(self) -> float:
        """What plans are compared by. Among equal peers it is the time to the last one, times a constant. Where one peer is so slow that it is
        the last in any plan, `last_s` would hide whom else it holds up; `stretch` shows it."""
        return math.sqrt(self.last_s * self.stretch)


def median_bps(rates_bps: Iterable[float | None]) -> float:
    """The median of the rates that are known; `DEFAULT_PEER_BPS` when none is."""
    known = [max(rate, MIN_PEER_BPS) for rate in rates_bps if rate is not None]
    return median(known) if known else DEFAULT_PEER_BPS


def member_rates(members: Mapping[str, Member]) -> dict[str, float]:
    """Each member's rate, the unknown at the median."""
    middle = median_bps(m.bps for m in members.values())
    return {id_: middle if m.bps is None else max(m.bps, MIN_PEER_BPS) for id_, m in members.items()}


def number_of_chains(uplink_bps: float, peer_bps: Iterable[float | None], n: int) -> int:
    """Chains that the hub's uplink can feed at a peer's full rate: floor(uplink / median peer rate), within 1…n (0 when n is 0).

    ECHO-2, section 4.2 and appendix C.3. Raises PlanError when the uplink is not above 0.
    """
    if not uplink_bps > 0:
        raise PlanError(f"uplink of {uplink_bps!r} bits/s: it must be above 0")
    ratio = uplink_bps / median_bps(peer_bps)
    return min(n, max(1, int(min(ratio, float(n)))))


def ideal_s(payload_bytes: float, peer_bps: float) -> float:
    """The payload at the peer's own rate: no plan can be faster."""
    return 8.0 * payload_bytes / peer_bps


def chain_times_s(payload_bytes: float, rates_bps: Sequence[float], piece_bytes: float, rtts_s: Sequence[float]) -> list[float]:
    """Seconds until each peer of one chain holds the payload; one rate and one round trip per hop, from the hub on.

    Raises ValueError when there are more of the one than of the other.
    """
    piece = min(piece_bytes, payload_bytes)
    slowest, hops_s = float("inf"), 0.0
    times_s: list[float] = []
    for rate, rtt in zip(rates_bps, rtts_s, strict=True):
        slowest = min(slowest, rate)
        hops_s += 8.0 * piece / rate + rtt / 2
        times_s.append(8.0 * (payload_bytes - piece) / slowest + hops_s)
    return times_s


def chain_time_s(payload_bytes: float, rates_bps: Sequence[float], piece_bytes: float, rtts_s: Sequence[float]) -> float:
    """Seconds until the last peer of one chain holds the payload, 0 for an empty one; see `chain_times_s`."""
    return max(chain_times_s(payload_bytes, rates_bps, piece_bytes, rtts_s), default=0.0)


def fair_shares(capacity: float, demands: Sequence[float]) -> list[float]:
    """Max-min fair shares of `capacity`: nobody gets more than asked for, and what one leaves goes to the rest."""
    shares = [0.0] * len(demands)
    left, waiting = capacity, len(demands)
    for index in sorted(range(len(demands)), key=lambda i: (demands[i], i)):
        shares[index] = min(demands[index], left / waiting)
        left -= shares[index]
        waiting -= 1
    return shares


def predict(
    plan: Plan, members: Iterable[Member], payload_bytes: float, uplink_bps: float, network: Network = DEFAULT_NETWORK
) -> Prediction:
    """Every peer's predicted time in seconds, the last one's, and the worst stretch.

    Raises PlanError when a peer of the plan is not among the members.
    """
    table = by_id(members)
    if strangers := plan.parent.keys() - table.keys():
        raise PlanError(f"peer {min(strangers)!r} is in the plan but not among the members")
    return predict_at(plan, table, member_rates(table), payload_bytes, uplink_bps, network)


def predict_at(
    plan: Plan,
    table: Mapping[str, Member],
    rates: Mapping[str, float],
    payload_bytes: float,
    uplink_bps: float,
    network: Network = DEFAULT_NETWORK,
) -> Prediction:
    """`predict` for who has members and rates under their ids already: one pass, a microsecond or two a peer."""
    middle = median(rates.values()) if rates else DEFAULT_PEER_BPS
    piece_bits = 8.0 * min(network.piece_bytes, payload_bytes)
    rest_bits = 8.0 * payload_bytes - piece_bits
    payload_bits = 8.0 * payload_bytes
    near_s, far_s = network.near_rtt_s / 2 + network.hop_s, network.far_rtt_s / 2 + network.hop_s
    times_s: dict[str, float] = {}
    stretch = 1.0
    waiting: list[tuple[str, str, float, float, float]] = [(ROOT, network.root_region, uplink_bps, math.inf, 0.0)]
    for sender, region, capacity, slowest, hops_s in waiting:  # grows as it goes
        below = plan.children(sender)
        if len(below) == 1:
            shares = [min(capacity, rates[below[0]])]
        elif below:
            shares = fair_shares(capacity, [rates[child] for child in below])
        else:
            continue
        for child, share in zip(below, shares, strict=True):
            there, rate = table[child].region, rates[child]
            narrow = share if share < slowest else slowest
            hops = hops_s + piece_bits / share + (near_s if there == region else far_s)
            time_s = times_s[child] = rest_bits / narrow + hops
            ratio = time_s * (rate if rate < middle else middle)
            if ratio > stretch * payload_bits and payload_bits > 0:
                stretch = ratio / payload_bits
            waiting.append((child, there, rate, narrow, hops))
    return Prediction(times_s, max(times_s.values(), default=0.0), stretch)


def time_to_last_s(
    plan: Plan, members: Iterable[Member], payload_bytes: float, uplink_bps: float, network: Network = DEFAULT_NETWORK
) -> float:
    """Seconds until every peer holds the payload; see `predict`."""
    return predict(plan, members, payload_bytes, uplink_bps, network).last_s
