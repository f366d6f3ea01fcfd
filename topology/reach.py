"""Who can dial whom, as far as the hub can tell, and at which addresses.

A link needs one of two that can dial the other, and the hub, which everybody can dial. What is known: the families that a peer can dial, whether it answered when
the hub dialled it back, and who has tried to reach whom since. Doubt is hope: whoever may be in reach is tried, and one try that failed is remembered. A hub that
reaches nobody at all proves nothing about them (it may not be let out itself): then a peer's own failed try has to confirm it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from topology.tree import ROOT

Address: TypeAlias = tuple[str, int]

FORGET_S: Final = 60.0
"""A failed try counts for so long, and twice as long each time that it fails again."""
MOST_S: Final = 3600.0
BOTH: Final = frozenset({4, 6})


@dataclass(frozen=True, slots=True)
class Contact:
    """An address of a peer. ``family`` None: a name, which may have addresses of both. ``own``: of its own network, and perhaps of no meaning outside.
    ``loopback``: within one machine, the hub's."""

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
    """On the hub's machine."""
    answers: dict[Address, bool] = field(default_factory=dict)
    """To the hub."""
    reached: bool = False
    """By a peer elsewhere."""
    missed: bool = False
    """By a peer elsewhere that tried."""

    @property
    def answers_nowhere(self) -> bool:
        return all(self.answers.get(way.address) is False for way in self.ways)


class Reach:
    """Ids are the planner's. ``now`` in seconds, of one clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._missed: dict[tuple[str, str], tuple[float, float]] = {}
        """(dialler, peer) → until when that counts, and for how long it did."""
        self._shut: set[str] = set()
        self._heard = 0
        """Peers that have answered the hub."""
        self._families: Counter[frozenset[int]] = Counter()
        self.turn = 0
        """Grows when somebody turns out to be harder or easier to reach than was thought: what peers were told of it is old then."""

    def join(
        self, peer: str, site: str, ways: Iterable[Contact], families: Iterable[int] = BOTH, *, beside_hub: bool = False
    ) -> None:
        """``site``: peers of one site are likely to reach each other, whatever keeps others out. ``ways`` in the order in which to try them."""
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
            self._heard -= 1
            if not self._heard:
                self._judge(self._known)
        self._missed = {pair: held for pair, held in self._missed.items() if peer not in pair}

    def answered(self, peer: str, address: Address, answers: bool) -> None:
        """What became of the hub's dialling it back."""
        known = self._known.get(peer)
        if known is None or address not in {way.address for way in known.ways}:
            return
        if answers is not known.answers.get(address, True):
            self.turn += 1
        heard, before = self._heard, any(known.answers.values())
        known.answers[address] = answers
        self._heard += any(known.answers.values()) - before
        self._judge([peer] if (heard > 0) == (self._heard > 0) else self._known)

    def reached(self, dialler: str, peer: str) -> None:
        """``dialler`` has a link to ``peer`` that it dialled."""
        if self._missed.pop((dialler, peer), None) is not None:
            self.turn += 1
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is not None and known is not None and mine.site != known.site and not known.reached:
            known.reached, known.missed = True, False
            self.turn += peer in self._shut
            self._judge([peer])

    def unreached(self, dialler: str, peer: str, now: float) -> None:
        """``dialler`` has tried each address of ``peer``, and nobody was there."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if mine is None or known is None:
            return
        until, held_s = self._missed.get((dialler, peer), (0.0, FORGET_S / 2))
        if until > now:
            return  # a peer that repeats itself would otherwise have every peer told of it
        held_s = min(MOST_S, 2 * held_s)
        self._missed[dialler, peer] = now + held_s, held_s
        self.turn += 1
        if mine.site != known.site:
            known.missed, known.reached = True, False
            self._judge([peer])

    def dials(self, dialler: str, peer: str, now: float) -> bool:
        """Whether ``dialler`` may well reach ``peer``."""
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
        """Everybody reaches everybody, as far as is known: a plan needs no look at it."""
        return not self._missed and not self._shut and sum(1 for count in self._families.values() if count) < 2

    def shut(self, peer: str) -> bool:
        """Whether nobody from elsewhere gets in there."""
        return peer in self._shut

    def ways(self, dialler: str, peer: str) -> list[Address]:
        """Addresses of ``peer``, the likeliest to work from ``dialler`` first."""
        mine, known = self._known.get(dialler), self._known.get(peer)
        if known is None:
            return []
        usable = [way for way in known.ways if mine is None or _usable(way, mine)]
        if mine is not None and mine.site == known.site:
            # What the hub has tried says nothing about a way that does not leave the site.
            ranked = sorted(usable, key=lambda way: (not way.loopback, not way.own))
        else:
            ranked = sorted(usable, key=lambda way: {True: 0, None: 1, False: 2}[known.answers.get(way.address)])
        return [way.address for way in ranked]

    def silent(self) -> list[str]:
        """Who has answered the hub nowhere."""
        return [peer for peer, known in self._known.items() if known.answers_nowhere]

    def answers(self, peer: str) -> list[tuple[Address, bool | None]]:
        """Every address of ``peer``, and whether it answers the hub there; None: not known yet."""
        known = self._known.get(peer)
        return [] if known is None else [(way.address, known.answers.get(way.address)) for way in known.ways]

    def _judge(self, peers: Iterable[str]) -> None:
        for peer in peers:
            known = self._known[peer]
            if known.answers_nowhere and not known.reached and (self._heard > 0 or known.missed):
                self._shut.add(peer)
            else:
                self._shut.discard(peer)


def _usable(way: Contact, dialler: _Known) -> bool:
    return (way.family is None or way.family in dialler.families) and (not way.loopback or dialler.beside_hub)
