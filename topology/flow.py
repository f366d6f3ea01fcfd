"""One payload flowing down a tree that changes: a fluid model, from one change to the next.

Everybody stores what comes and passes it on. A sender's rate is shared among its children, max-min fairly; a child that has all that its parent has
gets no more than comes in there; one that has more waits until the parent has caught up. Between changes all rates are constant, so states are exact at any
time. What a pipeline's hops add (a piece's own time and half a round trip each, `topology.model`) is added when somebody has finished.

Bytes and bits per second; time is any clock, passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from topology.model import DEFAULT_NETWORK, Network, fair_shares
from topology.tree import ROOT

LEVEL_BITS: Final = 1.0
"""Closer than this, two have the same."""


class Flow:
    """`attach`, `detach` and `limit` change the tree; `advance` lets time pass up to the next thing that happens by itself."""

    def __init__(
        self, payload_bytes: float, uplink_bps: float, regions: Mapping[str, str], network: Network = DEFAULT_NETWORK
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
        """Somebody who is fed by nobody yet. `got_bytes` may be below 0: that much of earlier payloads comes first."""
        self._limit[peer], self._got[peer], self._rate[peer] = bps, 8.0 * got_bytes, 0.0
        self._children.setdefault(peer, {})

    def remove(self, peer: str) -> list[str]:
        """Whoever it fed is fed by nobody now: these."""
        self.detach(peer)
        orphans = list(self._children.pop(peer))
        for orphan in orphans:
            del self._parent[orphan]
        del self._limit[peer], self._got[peer], self._rate[peer]
        self._stale = True
        return orphans

    def attach(self, peer: str, parent: str) -> None:
        """From now on it is fed by `parent`, which must not hang below it."""
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
        """What it can take in, and send, from now on."""
        self._limit[peer] = bps
        self._stale = True

    def parent(self, peer: str) -> str | None:
        return self._parent.get(peer)

    def feeds(self, peer: str, other: str) -> bool:
        """Whether `other` hangs below `peer`, or is it."""
        above: str | None = other
        while above is not None and above != ROOT:
            if above == peer:
                return True
            above = self._parent.get(above)
        return False

    def got_bytes(self, peer: str) -> float:
        return self._got[peer] / 8.0

    def behind_bytes(self, peer: str) -> float:
        """What its parent has and it lacks; below 0 where it has more."""
        above = self._parent[peer]
        return ((self.payload_bits if above == ROOT else self._got[above]) - self._got[peer]) / 8.0

    def done(self, peer: str) -> bool:
        return self._got[peer] >= self.payload_bits

    def hops_s(self, peer: str) -> float:
        """What the hops above it add."""
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
        """The next payload. What somebody lacks of this one comes first."""
        for peer, got in self._got.items():
            self._got[peer] = got - self.payload_bits
        self._stale = True

    def advance(self, until_s: float) -> tuple[float, list[str]]:
        """Let time pass to `until_s`, or to the next moment at which somebody has finished: that moment, and who."""
        while True:
            if self._stale:
                self._settle()
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

    def _settle(self) -> None:
        """Everybody's rate, and when the next of them changes by itself."""
        got, limit, payload = self._got, self._limit, self.payload_bits
        rate = dict.fromkeys(got, 0.0)
        due_s = math.inf
        waiting: list[tuple[str, float, float]] = [(ROOT, math.inf, payload)]
        for sender, inflow, there in waiting:  # grows as it goes
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
