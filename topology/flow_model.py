"""A fluid, event-driven model of one payload that flows down a changing tree.

Every peer stores what it receives and forwards it. The children of a sender share its rate max-min fairly. A child that
has as much as its parent receives no faster than the parent does. A child that has more waits until the parent has
caught up. Between events all rates are constant, so states are exact at any time. The hops' delay
(`topology.broadcast_time`) is left out: callers add `FlowModel.hops_s` when a peer has finished.

Sizes are in bytes, rates in bits per second. Times come from the caller, by any clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from topology.broadcast_time import DEFAULT_NETWORK, BroadcastNetwork, fair_shares
from topology.plan_tree import ROOT

LEVEL_BITS: Final = 1.0
"""Two peers whose amounts differ by less than this many bits count as equal."""


class FlowModel:
    """The tree and what each peer has. `attach`, `detach` and `limit` change the tree; `advance` moves the clock."""

    def __init__(
        self,
        payload_bytes: float,
        uplink_bps: float,
        regions: Mapping[str, str],
        network: BroadcastNetwork = DEFAULT_NETWORK,
    ) -> None:
        self.payload_bits = 8.0 * payload_bytes
        self._network = network
        self._regions = regions
        self._limit: dict[str, float] = {ROOT: uplink_bps}
        self._parent: dict[str, str] = {}
        self._children: dict[str, dict[str, None]] = {ROOT: {}}
        self._got: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._now_s = 0.0
        self._due_s = math.inf
        self._stale = True

    def add(self, peer: str, bps: float, got_bytes: float = 0.0) -> None:
        """Add a peer without a parent. If `got_bytes` is negative, that much of earlier payloads comes first."""
        self._limit[peer], self._got[peer], self._rate[peer] = bps, 8.0 * got_bytes, 0.0
        self._children.setdefault(peer, {})

    def remove(self, peer: str) -> list[str]:
        """Remove a peer and return its children, which have no parent now."""
        self.detach(peer)
        orphans = list(self._children.pop(peer))
        for orphan in orphans:
            del self._parent[orphan]
        del self._limit[peer], self._got[peer], self._rate[peer]
        self._stale = True
        return orphans

    def attach(self, peer: str, parent: str) -> None:
        """Make `parent`, which must not be below `peer`, feed `peer` from now on."""
        self.detach(peer)
        self._parent[peer] = parent
        self._children[parent][peer] = None
        self._stale = True

    def detach(self, peer: str) -> None:
        above = self._parent.pop(peer, None)
        if above is not None:
            del self._children[above][peer]
            self._stale = True

    def limit(self, peer: str, bps: float) -> None:
        """Set the peer's rate for receiving and sending, each, from now on."""
        self._limit[peer] = bps
        self._stale = True

    def parent(self, peer: str) -> str | None:
        return self._parent.get(peer)

    def feeds(self, peer: str, other: str) -> bool:
        """Whether `other` is `peer` or below `peer`."""
        above: str | None = other
        while above is not None and above != ROOT:
            if above == peer:
                return True
            above = self._parent.get(above)
        return False

    def got_bytes(self, peer: str) -> float:
        return self._got[peer] / 8.0

    def behind_bytes(self, peer: str) -> float:
        """Return how many bytes the peer is behind its parent; negative if the peer is ahead."""
        above = self._parent[peer]
        return ((self.payload_bits if above == ROOT else self._got[above]) - self._got[peer]) / 8.0

    def done(self, peer: str) -> bool:
        return self._got[peer] >= self.payload_bits

    def hops_s(self, peer: str) -> float:
        """Return the delay in seconds of the hops above the peer."""
        piece_bits = 8.0 * min(self._network.piece_bytes, self.payload_bits / 8.0)
        total_s = 0.0
        above = self._parent.get(peer)
        while above is not None:
            there = self._network.root_region if above == ROOT else self._regions[above]
            total_s += piece_bits / self._limit[peer] + self._network.rtt_s(there, self._regions[peer]) / 2
            total_s += self._network.hop_s
            peer, above = above, self._parent.get(above)
        return total_s

    def restart(self) -> None:
        """Begin the next payload. A peer first receives what it is missing of the current one."""
        for peer, got in self._got.items():
            self._got[peer] = got - self.payload_bits
        self._stale = True

    def advance(self, until_s: float) -> tuple[float, list[str]]:
        """Advance to `until_s`, or to the time at which the next peer finishes if that is earlier. Returns the time
        reached, and the peers that finished.
        """
        while True:
            if self._stale:
                self._recompute_rates()
            to_s = min(until_s, self._due_s)
            span_s = to_s - self._now_s
            finished: list[str] = []
            if span_s > 0:
                for peer, rate in self._rate.items():
                    if rate > 0:
                        got = self._got[peer] + rate * span_s
                        if got >= self.payload_bits - LEVEL_BITS:
                            got = self.payload_bits
                            finished.append(peer)
                        self._got[peer] = got
            self._now_s = to_s
            if to_s == self._due_s:
                self._stale = True
            if finished or to_s >= until_s:
                self._stale = self._stale or bool(finished)
                return to_s, finished

    def _recompute_rates(self) -> None:
        """Compute all rates and the time of the next event."""
        got, limit, payload = self._got, self._limit, self.payload_bits
        rate = dict.fromkeys(got, 0.0)
        due_s = math.inf
        waiting: list[tuple[str, float, float]] = [(ROOT, math.inf, payload)]
        for sender, inflow, there in waiting:  # the loop appends to the list
            children = self._children[sender]
            wanting = [child for child in children if got[child] < payload]
            demands: list[float] = []
            for child in wanting:
                ahead = there - got[child]
                if ahead > LEVEL_BITS:
                    demands.append(limit[child])
                else:
                    demands.append(min(limit[child], inflow) if ahead >= -LEVEL_BITS else 0.0)
                    if ahead < -LEVEL_BITS and inflow > 0:
                        due_s = min(due_s, -ahead / inflow)
            shares = [min(limit[sender], demands[0])] if len(demands) == 1 else fair_shares(limit[sender], demands)
            for child, share in zip(wanting, shares, strict=True):
                rate[child] = share
                if share > 0:
                    due_s = min(due_s, (payload - got[child]) / share)
                if share > inflow and there - got[child] > LEVEL_BITS:
                    due_s = min(due_s, (there - got[child]) / (share - inflow))
            waiting.extend((child, rate[child], got[child]) for child in children)
        self._rate, self._stale = rate, False
        self._due_s = self._now_s + due_s
