"""A plan in which everybody can be linked to its parent.

The planner's own rules know nothing of addresses. Whatever plan they propose is mended here before it is judged: who cannot be linked to its parent is hung
elsewhere, with all that hangs below it, and nobody else moves.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from topology.tree import ROOT, Plan

Links: TypeAlias = Callable[[str, str], bool]
"""(above, below): whether the one may feed the other. Of ROOT it is always true."""
SAMPLE: Final = 16
"""Peers by which it is judged how many a peer can be linked to."""
LOOKED_AT: Final = 32
"""Candidates for one place, of each kind."""


def mend(plan: Plan, links: Links, chains: int) -> Plan:
    """Under the old epoch; the plan itself when nothing is wrong with it.

    Who has to move begins a chain while there are fewer than ``chains``, else goes to the highest tail that it can be linked to, else beside a leaf or where a
    second child does least harm (as low as possible), else to the hub.
    """
    wrong = [peer for peer in plan.order if (above := plan.parent[peer]) != ROOT and not links(above, peer)]
    if not wrong:
        return plan
    places = _Places(plan, links, chains)
    return plan.changed(plan.epoch, {peer: places.move(peer) for peer in wrong})


class _Places:
    """Where there is room, while peers are moved one after the other, each with all below it. Depths are those of the plan before."""

    def __init__(self, plan: Plan, links: Links, chains: int) -> None:
        self._plan = plan
        self._links = links
        self._heads_left = chains - len(plan.children(ROOT))
        self._below = {peer: list(plan.children(peer)) for peer in plan.parent}
        self._tails = list(plan.tails)
        self._singles = [self._single(peer) for peer, below in self._below.items() if len(below) == 1 and peer not in plan.leaves]
        self._singles.sort()

    def move(self, peer: str) -> str:
        """Take it from where it is, and return its new parent."""
        branch = self._branch(peer)
        parent = self._found(peer, branch)
        self._leave(self._plan.parent[peer], peer)
        if parent == ROOT:
            self._heads_left -= 1
        else:
            self._below[parent].append(peer)
            if len(self._below[parent]) == 1:
                self._tails.remove((self._plan.depth_of(parent), parent))
                insort(self._singles, self._single(parent))
        return parent

    def _found(self, peer: str, branch: set[str]) -> str:
        if self._heads_left > 0:
            return ROOT
        for _, tail in self._tails:
            if tail not in branch and self._links(tail, peer):
                return tail
        for _, _, other in self._singles:
            if len(self._below[other]) == 1 and other not in branch and self._links(other, peer):
                return other
        return ROOT

    def _leave(self, above: str, peer: str) -> None:
        self._below[above].remove(peer)
        if not self._below[above]:
            insort(self._tails, (self._plan.depth_of(above), above))
        elif len(self._below[above]) == 1:
            insort(self._singles, self._single(above))

    def _single(self, peer: str) -> tuple[bool, int, str]:
        """Sorts those that feed one: beside a leaf first, then the lowest."""
        return (self._below[peer][0] not in self._plan.leaves, -self._plan.depth_of(peer), peer)

    def _branch(self, peer: str) -> set[str]:
        found, waiting = set(), [peer]
        while waiting:
            found.add(one := waiting.pop())
            waiting += self._below[one]
        return found


def weave(ranked: Sequence[str], links: Links, chains: int) -> dict[str, str]:
    """Who hangs below whom when peers are dealt into chains so that each can be linked to the one before: those who can be linked to few come as early
    as they can, since nobody but the others can stand between two of them. In the order given else. Who finds no place is left out.
    """
    sample = ranked[:: max(1, len(ranked) // SAMPLE)][:SAMPLE]
    share = {p: sum(links(p, q) for q in sample if q != p) / max(1, len(sample) - (p in sample)) for p in ranked}
    most = max(share.values(), default=0.0)
    tight, free = ([p for p in ranked if (share[p] < most) == is_tight] for is_tight in (True, False))
    parent: dict[str, str] = {}
    ends = [(0, number, ROOT) for number in range(chains)]
    while ends and (tight or free):
        length, number, end = heapq.heappop(ends)
        # Where most can be linked to few, those begin chains too; else the best do.
        turns = (tight, free) if end != ROOT or 2 * len(tight) > len(ranked) else (free, tight)
        for pool in turns:
            found = next((p for p in islice(pool, LOOKED_AT) if links(end, p)), None)
            if found is not None:
                pool.remove(found)
                parent[found] = end
                heapq.heappush(ends, (length + 1, number, found))
                break
    return parent
