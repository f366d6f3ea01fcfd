"""One version down a given tree, with given faults: the simulator's prediction of a measured broadcast.

The model is that of `netem.simulation.fleet_simulator`, with the same decisions; nothing in it is random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random

from netem.simulation.fleet_simulator import TICK_S, FleetEvents, SimulatedFleet
from topology.plan_tree import ROOT, Plan
from trainer_node.membership.peer_record import PeerRecord

MOST_S = 300.0
"""Limit of the simulated time."""


@dataclass(frozen=True, slots=True)
class BroadcastFault:
    """``after_s`` from the beginning, ``peer`` is killed, and the kernel closes its connections. With ``bps`` the peer
    slows down instead. With ``healed_s`` it is cut off without closed connections, and returns at that time with its
    data.
    """

    after_s: float
    peer: str
    bps: float | None = None
    healed_s: float | None = None


def replay(
    scenario: FleetEvents,
    parent: Mapping[str, str],
    faults: Collection[BroadcastFault],
    chains: int | None = None,
    most_s: float = MOST_S,
) -> dict[str, float]:
    """Seconds until each living peer has the version. ``parent``: name → a peer, or ROOT. ``scenario``: only payload,
    rates and network are used. Infinite for a peer that is incomplete after ``most_s``.
    """
    return _Replay(scenario, parent, chains).play(faults, most_s)


class _Replay(SimulatedFleet):
    def __init__(self, scenario: FleetEvents, parent: Mapping[str, str], chains: int | None) -> None:
        super().__init__(scenario, Random(0), chains)
        self._cut: dict[str, float] = {}
        """Bytes that disconnected peers hold."""
        order = Plan((1, 0), parent).order
        self._ident = {ROOT: ROOT} | {name: f"{at:08x}" for at, name in enumerate(order)}
        for name in order:
            self.membership.join(self._new_record(self._ident[name]), self.now)
        links = {self._ident[name]: self._ident[above] for name, above in parent.items()}
        self.membership.plan = Plan(self.membership.plan.epoch, links)
        for peer, above in links.items():
            self.flow.attach(peer, above)
            self.membership.note_parent(peer, above, self.membership.plan.epoch)

    def play(self, faults: Collection[BroadcastFault], most_s: float) -> dict[str, float]:
        self._begin()
        for fault in faults:
            self._at(fault.after_s, lambda b=fault: self._inject(self._ident[b.peer], b))  # type: ignore[misc]
        self._at(TICK_S, self._tick)
        while (self._cut or not all(peer in self._done_s for peer in self._alive())) and self._agenda[0][0] < most_s:
            self._until(self._agenda[0][0])
            heapq.heappop(self._agenda)[2]()
        names = {peer: name for name, peer in self._ident.items()}
        return {names[peer]: self._done_s.get(peer, math.inf) for peer in self._alive()}

    def _inject(self, peer: str, fault: BroadcastFault) -> None:
        if fault.bps is not None:
            self.flow.limit(peer, fault.bps)
        elif fault.healed_s is None:
            self._kill(peer, noticed=True)
        else:
            self._cut[peer] = self.flow.got_bytes(peer)
            self._at(fault.healed_s, lambda: self._heal(peer))
            self._kill(peer, noticed=False)

    def _heal(self, peer: str) -> None:
        """Reconnect the peer to its parent or the next of its backups, as after a lost parent. A peer that the hub has
        removed meanwhile joins as a new one.
        """
        self.flow.add(peer, self.scenario.peer_bps, self._cut.pop(peer))
        self._dead.discard(peer)
        if peer not in self.membership.peers:
            self._staged[peer] = None
            self._ordered(
                lambda: self.membership.join(PeerRecord(peer, peer, self.regions[peer], "", 0, self.now), self.now)
            )
        self._lag[peer].begin(self.now, int(self.flow.got_bytes(peer)))
        self._orphaned(peer)
