"""Reachability: which peer can dial which, as far as the hub knows, and at which addresses.

Two peers can be linked if either can dial the other; the hub, which every peer can dial, arranges reverse dialling. The
hub knows the address families that a peer can dial, whether a peer answered when the hub dialled it back, and the
peers' own attempts since then. Unknown pairs count as reachable; a failed attempt is remembered for a while. A hub that
reaches no peer at all may itself be unable to dial out. Then only the peers' own failed attempts count.
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
"""Seconds for which a failed attempt counts; doubled with each further failure."""
MOST_S: Final = 3600.0
"""Most seconds for which a failed attempt counts."""
BOTH: Final = frozenset({4, 6})


@dataclass(frozen=True, slots=True)
class Contact:
    """An address of a peer. ``family``: None for a host name, which may have addresses of both families. ``own``: an
    address in the peer's own network, perhaps not valid outside it. ``loopback``: valid only on the hub's machine.
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
    """Address → whether the peer answered when the hub dialled it there."""
    reached: bool = False
    """A peer at another site has dialled this one."""
    missed: bool = False
    """A peer at another site has tried to dial this one and failed."""

    @property
    def answers_nowhere(self) -> bool:
        return all(self.answers.get(way.address) is False for way in self.ways)


class Reach:
    """The reachability of all peers. Ids are the planner's. ``now``: seconds of one clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._missed: dict[tuple[str, str], tuple[float, float]] = {}
        """(dialler, peer) → until when a failure counts, and for how many seconds in all."""
        self._forget_at = math.inf
        """When the next failure stops counting."""
        self._shut: set[str] = set()
        """Peers that no peer at another site can dial."""
        self._answering = 0
        """Number of peers that the hub has reached."""
        self._families: Counter[frozenset[int]] = Counter()
        self.turn = 0
        """Grows with every change in a peer's reachability: what was sent to peers before is then out of date."""

    def join(
        self, peer: str, site: str, ways: Iterable[Contact], families: Iterable[int] = BOTH, *, beside_hub: bool = False
    ) -> None:
        """Add a peer. ``site``: peers at one site can probably dial each other, even behind a NAT. ``ways``: the peer's
        addresses in the order in which to try them.
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
        """Record that ``dialler`` has reached ``peer``."""
        if self._missed.pop((dialler, peer), None) is not None:
            self.turn += 1
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is not None and known is not None and mine.site != known.site and not known.reached:
            known.reached, known.missed = True, False
            self.turn += peer in self._shut
            self._judge([peer])

    def unreached(self, dialler: str, peer: str, now: float) -> None:
        """Record that ``dialler`` could not reach ``peer`` at any address."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is None or known is None:
            return
        until, held_s = self._missed.get((dialler, peer), (0.0, FORGET_S / 2))
        if until > now:
            return  # otherwise a peer that repeats itself would cause messages to every peer
        held_s = min(MOST_S, 2 * held_s)
        self._missed[dialler, peer] = now + held_s, held_s
        self._forget_at = min(self._forget_at, now + held_s)
        self.turn += 1
        if mine.site != known.site:
            known.missed, known.reached = True, False
            self._judge([peer])

    def forgot(self, now: float) -> bool:
        """Whether a failed attempt has stopped counting since the last call."""
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
        """Whether every peer can probably dial every other, so that plans need no repair of links."""
        return not self._missed and not self._shut and sum(1 for count in self._families.values() if count) < 2

    def shut(self, peer: str) -> bool:
        """Whether no peer at another site can dial this one."""
        return peer in self._shut

    def ways(self, dialler: str, peer: str) -> list[Address]:
        """Return the addresses at which ``dialler`` should try ``peer``, the most likely to work first."""
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
        """Return the peers that the hub has tried at all of their addresses, none of which answered."""
        return [peer for peer, known in self._known.items() if known.answers_nowhere]

    def answers(self, peer: str) -> list[tuple[Address, bool | None]]:
        """Return every address of ``peer``, and whether the peer answers the hub there (None if unknown)."""
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
