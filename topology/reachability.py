"""Reachability: which peer can dial which, by the hub's knowledge, and at which addresses.

A link between two peers needs one that can dial the other; reverse dialling goes through the hub, which every peer can
dial. Known facts: the address families that a peer can dial, whether a peer answered when the hub dialled it back, and
the peers' own attempts since. Unknown pairs count as reachable; a failed attempt is remembered. A hub that reaches no
peer at all may itself be unable to dial out: then only a peer's own failed attempt counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from topology.plan_tree import ROOT

Address: TypeAlias = tuple[str, int]

FORGET_S: Final = 60.0
"""Time in seconds for which a failed attempt counts; doubled with each further failure."""
MOST_S: Final = 3600.0
"""Longest time in seconds for which a failed attempt counts."""
BOTH: Final = frozenset({4, 6})


@dataclass(frozen=True, slots=True)
class Contact:
    """An address of a peer. ``family`` None: a name, which may have addresses of both families. ``own``: an address of
    the peer's own network, perhaps not valid outside. ``loopback``: valid on the hub's machine only.
    """

    address: Address
    family: int | None = None
    own: bool = False
    loopback: bool = False


@dataclass(slots=True)
class _Known:
    site: str
    families: frozenset[int]
    ways: tuple[Contact, ...]
    beside_hub: bool
    """The peer runs on the hub's machine."""
    answers: dict[Address, bool] = field(default_factory=dict)
    """Address → whether the peer answered the hub there."""
    reached: bool = False
    """A peer at another site has dialled this one."""
    missed: bool = False
    """A peer at another site has tried to dial this one and failed."""

    @property
    def answers_nowhere(self) -> bool:
        return all(self.answers.get(way.address) is False for way in self.ways)


class Reach:
    """Reachability of all peers. Ids are the planner's. ``now`` in seconds, of one clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._missed: dict[tuple[str, str], tuple[float, float]] = {}
        """(dialler, peer) → end and length in seconds of the time for which a failure counts."""
        self._forget_at = math.inf
        """When the next failure stops counting."""
        self._shut: set[str] = set()
        """Peers that no peer of another site can dial."""
        self._answering = 0
        """Number of peers that have answered the hub."""
        self._families: Counter[frozenset[int]] = Counter()
        self.turn = 0
        """Grows with every change in a peer's reachability: information sent to peers before is out of date then."""

    def join(
        self, peer: str, site: str, ways: Iterable[Contact], families: Iterable[int] = BOTH, *, beside_hub: bool = False
    ) -> None:
        """Add a peer. ``site``: peers of one site can probably dial each other, even behind a NAT. ``ways``: addresses
        in the order of attempts.
        """
        self.leave(peer)
        known = _Known(site, frozenset(families) or BOTH, tuple(ways), beside_hub)
        self._known[peer] = known
        self._families[known.families] += 1

    def leave(self, peer: str) -> None:
        known = self._known.pop(peer, None)
        if known is None:
            return
        self._families[known.families] -= 1
        self._shut.discard(peer)
        if any(known.answers.values()):
            self._answering -= 1
            if not self._answering:
                self._judge(self._known)
        self._missed = {pair: held for pair, held in self._missed.items() if peer not in pair}

    def answered(self, peer: str, address: Address, answers: bool) -> None:
        """Record whether a peer answered when the hub dialled it back at an address."""
        known = self._known.get(peer)
        if known is None or address not in {way.address for way in known.ways}:
            return
        if answers is not known.answers.get(address, True):
            self.turn += 1
        answering, before = self._answering, any(known.answers.values())
        known.answers[address] = answers
        self._answering += any(known.answers.values()) - before
        self._judge([peer] if (answering > 0) == (self._answering > 0) else self._known)

    def reached(self, dialler: str, peer: str) -> None:
        """Record that ``dialler`` has dialled a link to ``peer``."""
        if self._missed.pop((dialler, peer), None) is not None:
            self.turn += 1
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is not None and known is not None and mine.site != known.site and not known.reached:
            known.reached, known.missed = True, False
            self.turn += peer in self._shut
            self._judge([peer])

    def unreached(self, dialler: str, peer: str, now: float) -> None:
        """Record that ``dialler`` has tried all addresses of ``peer`` in vain."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is None or known is None:
            return
        until, held_s = self._missed.get((dialler, peer), (0.0, FORGET_S / 2))
        if until > now:
            return  # otherwise a repeating peer would cause messages to every peer
        held_s = min(MOST_S, 2 * held_s)
        self._missed[dialler, peer] = now + held_s, held_s
        self._forget_at = min(self._forget_at, now + held_s)
        self.turn += 1
        if mine.site != known.site:
            known.missed, known.reached = True, False
            self._judge([peer])

    def forgot(self, now: float) -> bool:
        """Whether any failed attempt has stopped counting since the last call."""
        if now < self._forget_at:
            return False
        self._forget_at = min((until for until, _ in self._missed.values() if until > now), default=math.inf)
        return True

    def dials(self, dialler: str, peer: str, now: float) -> bool:
        """Whether ``dialler`` can probably dial ``peer``."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is None or known is None:
            return True
        if self._missed.get((dialler, peer), (now, 0.0))[0] > now:
            return False
        if peer in self._shut and mine.site != known.site:
            return False
        return any(_usable(way, mine) for way in known.ways)

    def links(self, above: str, below: str, now: float) -> bool:
        """Whether ``above`` may feed ``below``: one of them can dial the other."""
        return above == ROOT or self.dials(below, above, now) or self.dials(above, below, now)

    @property
    def plain(self) -> bool:
        """Whether every peer can probably dial every other, so that a plan needs no repair of links."""
        return not self._missed and not self._shut and sum(1 for count in self._families.values() if count) < 2

    def shut(self, peer: str) -> bool:
        """Whether no peer of another site can dial this one."""
        return peer in self._shut

    def ways(self, dialler: str, peer: str) -> list[Address]:
        """Addresses of ``peer`` for ``dialler``, the most likely to work first."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if known is None:
            return []
        usable = [way for way in known.ways if mine is None or _usable(way, mine)]
        if mine is not None and mine.site == known.site:
            # The hub's attempts say nothing about addresses inside the site.
            ranked = sorted(usable, key=lambda way: (not way.loopback, not way.own))
        else:
            ranked = sorted(usable, key=lambda way: {True: 0, None: 1, False: 2}[known.answers.get(way.address)])
        return [way.address for way in ranked]

    def silent(self) -> list[str]:
        """Peers that have answered the hub at none of their addresses."""
        return [peer for peer, known in self._known.items() if known.answers_nowhere]

    def answers(self, peer: str) -> list[tuple[Address, bool | None]]:
        """Every address of ``peer``, and whether the peer answers the hub there; None: unknown."""
        known = self._known.get(peer)
        return [] if known is None else [(way.address, known.answers.get(way.address)) for way in known.ways]

    def _judge(self, peers: Iterable[str]) -> None:
        for peer in peers:
            known = self._known[peer]
            if known.answers_nowhere and not known.reached and (self._answering > 0 or known.missed):
                self._shut.add(peer)
            else:
                self._shut.discard(peer)


def _usable(way: Contact, dialler: _Known) -> bool:
    return (way.family is None or way.family in dialler.families) and (not way.loopback or dialler.beside_hub)
