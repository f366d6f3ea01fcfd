"""One version down a given tree, with given blows: what the simulator says of a broadcast that has been measured.

The same world as `trainer_node.simulator`, and so the same decisions; nothing in it is random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random

from topology.tree import ROOT, Plan
from trainer_node.peer import Peer
from trainer_node.simulator import TICK_S, Scenario, World

MOST_S = 300.0
"""After so long nothing comes any more."""


@dataclass(frozen=True, slots=True)
class Blow:
    """``after_s`` from the beginning a peer is killed, of which the kernel tells, or with ``bps`` slows down to that; cut off, of which nobody is told, with ``healed_s``
    from the beginning back in reach, with what it had."""

    after_s: float
    peer: str
    bps: float | None = None
    healed_s: float | None = None


def replay(
    scenario: Scenario, parent: Mapping[str, str], blows: Collection[Blow], chains: int | None = None, most_s: float = MOST_S
) -> dict[str, float]:
    """Seconds until each peer that lives has it, by the names in ``parent`` (a peer, or ROOT); of the scenario, payload, rates and network count.
    Infinite for one that does not get it within ``most_s``."""
    return _Replay(scenario, parent, chains).play(blows, most_s)


class _Replay(World):
    def __init__(self, scenario: Scenario, parent: Mapping[str, str], chains: int | None) -> None:
        super().__init__(scenario, Random(0), chains)
        self._cut: dict[str, float] = {}
        """What those that are cut off have, in bytes."""
        order = Plan((1, 0), parent).order
        self._ident = {ROOT: ROOT} | {name: f"{at:08x}" for at, name in enumerate(order)}
        for name in order:
            self.membership.join(self._born_as(self._ident[name]), self.now)
        links = {self._ident[name]: self._ident[above] for name, above in parent.items()}
        self.membership.plan = Plan(self.membership.plan.epoch, links)
        for peer, above in links.items():
            self.flow.attach(peer, above)
            self.membership.moved(peer, above, self.membership.plan.epoch)

    def play(self, blows: Collection[Blow], most_s: float) -> dict[str, float]:
        self._begin()
        for blow in blows:
            self._at(blow.after_s, lambda b=blow: self._strike(self._ident[b.peer], b))  # type: ignore[misc]
        self._at(TICK_S, self._tick)
        while (self._cut or not all(peer in self._done_s for peer in self._alive())) and self._agenda[0][0] < most_s:
            self._until(self._agenda[0][0])
            heapq.heappop(self._agenda)[2]()
        names = {peer: name for name, peer in self._ident.items()}
        return {names[peer]: self._done_s.get(peer, math.inf) for peer in self._alive()}

    def _strike(self, peer: str, blow: Blow) -> None:
        if blow.bps is not None:
            self.flow.limit(peer, blow.bps)
        elif blow.healed_s is None:
            self._kill(peer, told=True)
        else:
            self._cut[peer] = self.flow.got_bytes(peer)
            self._at(blow.healed_s, lambda: self._heal(peer))
            self._kill(peer, told=False)

    def _heal(self, peer: str) -> None:
        """It finds its parent, or the next of its backups, as one that has lost it does. Whom the hub has given up by then joins anew."""
        self.flow.add(peer, self.scenario.peer_bps, self._cut.pop(peer))
        self._dead.discard(peer)
        if peer not in self.membership.peers:
            self._staged[peer] = None
            self._ordered(lambda: self.membership.join(Peer(peer, peer, self.regions[peer], "", 0, self.now), self.now))
        self._lag[peer].begin(self.now, int(self.flow.got_bytes(peer)))
        self._orphaned(peer)
