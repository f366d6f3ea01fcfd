"""Repairs plans so that every peer can be linked to its parent.

The planner's other rules ignore addresses. So every proposed plan is repaired here before it is predicted: a peer that
cannot be linked to its parent moves to a different parent, with its subtree. No other peer moves.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from topology.plan_tree import ROOT, Plan

Links: TypeAlias = Callable[[str, str], bool]
"""(above, below) → whether the first may feed the second. Always true if the first is ROOT."""
SAMPLE: Final = 16
"""Size of the sample from which `deal_linkable` estimates how many others a peer can be linked to."""
MAX_CANDIDATES: Final = 32
"""Most candidates of each kind examined for one place."""


def repair_links(plan: Plan, links: Links, chains: int) -> Plan:
    """Return the plan, under the old epoch, with only possible links; the plan itself if it has only these.

    A peer that must move heads a new chain while there are fewer than ``chains``. Otherwise it goes below the highest
    tail that it can be linked to. Failing that, it becomes a second child, if possible next to a leaf, or goes to the
    hub.
    """
    wrong = [peer for peer in plan.order if (above := plan.parent[peer]) != ROOT and not links(above, peer)]
    if not wrong:
        return plan
    places = _Places(plan, links, chains)
    return plan.changed(plan.epoch, {peer: places.move(peer) for peer in wrong})


class _Places:
    """Free places while peers move one by one, each with its subtree. Depths are those before the first move."""

    def __init__(self, plan: Plan, links: Links, chains: int) -> None:
        self._plan = plan
        self._links = links
        self._heads_left = chains - len(plan.children(ROOT))
        self._below = {peer: list(plan.children(peer)) for peer in plan.parent}
        self._tails = list(plan.tails)
        self._singles = [
            self._single(peer) for peer, below in self._below.items() if len(below) == 1 and peer not in plan.leaves
        ]
        self._singles.sort()

    def move(self, peer: str) -> str:
        """Move a peer and return its new parent."""
        subtree = self._subtree(peer)
        parent = self._found(peer, subtree)
        self._leave(self._plan.parent[peer], peer)
        if parent == ROOT:
            self._heads_left -= 1
        else:
            self._below[parent].append(peer)
            if len(self._below[parent]) == 1:
                self._tails.remove((self._plan.depth_of(parent), parent))
                insort(self._singles, self._single(parent))
        return parent

    def _found(self, peer: str, subtree: set[str]) -> str:
        if self._heads_left > 0:
            return ROOT
        for _, tail in self._tails:
            if tail not in subtree and self._links(tail, peer):
                return tail
        for _, _, other in self._singles:
            if len(self._below[other]) == 1 and other not in subtree and self._links(other, peer):
                return other
        return ROOT

    def _leave(self, above: str, peer: str) -> None:
        self._below[above].remove(peer)
        if not self._below[above]:
            insort(self._tails, (self._plan.depth_of(above), above))
        elif len(self._below[above]) == 1:
            insort(self._singles, self._single(above))

    def _single(self, peer: str) -> tuple[bool, int, str]:
        """Return the sort key of a peer with one child: peers whose child is a leaf come first, then the lowest."""
        return (self._below[peer][0] not in self._plan.leaves, -self._plan.depth_of(peer), peer)

    def _subtree(self, peer: str) -> set[str]:
        found, waiting = set(), [peer]
        while waiting:
            found.add(one := waiting.pop())
            waiting += self._below[one]
        return found


def deal_linkable(ranked: Sequence[str], links: Links, chains: int) -> dict[str, str]:
    """Deal peers into chains in which each can be linked to the one before, and return each peer's parent. Peers with
    few possible links come as early as possible, because only the other peers can go between two of them. Otherwise the
    given order is kept. Peers for which there is no place are left out.
    """
    sample = ranked[:: max(1, len(ranked) // SAMPLE)][:SAMPLE]
    share = {p: sum(links(p, q) for q in sample if q != p) / max(1, len(sample) - (p in sample)) for p in ranked}
    most = max(share.values(), default=0.0)
    tight, free = ([p for p in ranked if (share[p] < most) == is_tight] for is_tight in (True, False))
    parent: dict[str, str] = {}
    ends = [(0, number, ROOT) for number in range(chains)]
    while ends and (tight or free):
        length, number, end = heapq.heappop(ends)
        # If most peers have few possible links, such peers also begin chains; otherwise the best peers do.
        turns = (tight, free) if end != ROOT or 2 * len(tight) > len(ranked) else (free, tight)
        for pool in turns:
            found = next((p for p in islice(pool, MAX_CANDIDATES) if links(end, p)), None)
            if found is not None:
                pool.remove(found)
                parent[found] = end
                heapq.heappush(ends, (length + 1, number, found))
                break
    return parent
