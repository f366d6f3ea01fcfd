"""Neighbours: the peers that a peer attaches to when none of its ancestors answers, the hub included. With these, peers
without a hub exchange what they hold.

A cyclic walk over the plan in depth-first order defines the neighbours: the next peers after a peer's own subtree.
A peer that has lost all of its ancestors (an orphan) receives from the first neighbour that answers. That neighbour is
an orphan too. If one of its ancestors lived, the walk would have met that ancestor first, or it would be an ancestor
of both. So the orphans form one ring, and what any orphan holds reaches all. Each orphan has one source and tells it
what it holds, so no piece is sent twice around the ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from topology.plan_tree import ROOT, Plan

NEIGHBOURS: Final = 4
"""Number of neighbours of a peer. Fewer than this many in a row may have died."""
_MAX_CANDIDATES: Final = 8 * NEIGHBOURS
"""Most places examined for one peer: in a plan of one long chain, all other peers are ancestors or below."""


def neighbours_of(plan: Plan, peer: str, limit: int = NEIGHBOURS) -> tuple[str, ...]:
    """The neighbours of a peer, in the order in which the peer tries them. None is above or below the peer, and
    none is a leaf. Takes time in proportion to a chain's length at most.
    """
    above = set(plan.path(peer))
    window = islice(_following(plan, peer), _MAX_CANDIDATES)
    return tuple(islice((other for other in window if other not in above and other not in plan.leaves), limit))


def affected_peers(before: Plan, after: Plan, touched: Iterable[str]) -> set[str]:
    """Peers of `after` whose parent, further ancestors or neighbours may differ from `before`; perhaps a few
    more.

    `touched`: peers that joined, left, have another parent, or have become or ceased to be leaves. Takes time in
    proportion to their number and to the chains' lengths.
    """
    found: set[str] = set()
    for peer in touched:
        for plan in (before, after):
            if peer in plan:
                found.update(plan.subtree(peer))
                for earlier in islice(_preceding(plan, peer), _MAX_CANDIDATES):
                    found.update(_subtrees_ending_at(plan, earlier))
    return {peer for peer in found if peer in after}


def _following(plan: Plan, peer: str) -> Iterator[str]:
    """The cyclic walk from the end of a peer's subtree to the peer."""
    at = _first_after_subtree(plan, peer)
    while at != peer:
        yield at
        below = plan.children(at)
        at = below[0] if below else _first_after_subtree(plan, at)


def _first_after_subtree(plan: Plan, peer: str) -> str:
    """The first peer after a peer's subtree."""
    while peer != ROOT:
        above = plan.parent[peer]
        beside = plan.children(above)
        place = beside.index(peer) + 1
        if place < len(beside):
            return beside[place]
        peer = above
    return plan.children(ROOT)[0]


def _preceding(plan: Plan, peer: str) -> Iterator[str]:
    """The cyclic walk backwards from a peer, until it is back at the peer."""
    at = peer
    while True:
        above = plan.parent[at]
        place = plan.children(above).index(at)
        # Before the first head comes the subtree of the last head.
        at = _last_of_subtree(plan, plan.children(above)[place - 1]) if above == ROOT or place > 0 else above
        if at == peer:
            return
        yield at


def _last_of_subtree(plan: Plan, peer: str) -> str:
    """The last peer of a peer's subtree."""
    while below := plan.children(peer):
        peer = below[-1]
    return peer


def _subtrees_ending_at(plan: Plan, last: str) -> Iterator[str]:
    """Peers whose subtree ends with the peer `last`."""
    if plan.children(last):
        return
    peer = last
    while peer != ROOT:
        yield peer
        above = plan.parent[peer]
        if plan.children(above)[-1] != peer:
            return
        peer = above
