"""Neighbours: the peers to which a peer attaches when neither an ancestor nor the hub answers. Through them, peers that
have lost the hub exchange what they have.

A peer's neighbours are the next peers after its own subtree on a cyclic, depth-first walk over the plan. A peer that
has lost all of its ancestors (an orphan) receives from the first neighbour that answers. That neighbour is an orphan
too: if one of its ancestors were alive, the walk would have met that ancestor first, or it would be an ancestor of
both. So the orphans form one ring, and what any orphan has reaches all of them. Each orphan has one source and reports
to it what it has, so no piece is sent twice around the ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from topology.plan_tree import ROOT, Plan

NEIGHBOURS: Final = 4
"""Number of neighbours per peer. A peer finds a source as long as fewer than this many in a row have died."""
_MAX_CANDIDATES: Final = 8 * NEIGHBOURS
"""Most places examined for one peer: in a plan of one long chain, every other peer is above or below it."""


def neighbours_of(plan: Plan, peer: str, limit: int = NEIGHBOURS) -> tuple[str, ...]:
    """Return a peer's neighbours, in the order in which the peer tries them. None is above or below the peer, and none
    is a leaf. Takes time proportional to a chain's length at most.
    """
    above = set(plan.path(peer))
    window = islice(_following(plan, peer), _MAX_CANDIDATES)
    return tuple(islice((other for other in window if other not in above and other not in plan.leaves), limit))


def affected_peers(before: Plan, after: Plan, touched: Iterable[str]) -> set[str]:
    """Return the peers of `after` whose parent, further ancestors or neighbours may differ from those in `before`, and
    possibly a few more.

    `touched`: the peers that joined, left, got a different parent, or became or ceased to be leaves. Takes time
    proportional to their number and to the chains' lengths.
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
    """Yield the peers on the cyclic walk from the end of a peer's subtree up to the peer itself, which is excluded."""
    at = _first_after_subtree(plan, peer)
    while at != peer:
        yield at
        below = plan.children(at)
        at = below[0] if below else _first_after_subtree(plan, at)


def _first_after_subtree(plan: Plan, peer: str) -> str:
    """Return the first peer after a peer's subtree."""
    while peer != ROOT:
        above = plan.parent[peer]
        beside = plan.children(above)
        place = beside.index(peer) + 1
        if place < len(beside):
            return beside[place]
        peer = above
    return plan.children(ROOT)[0]


def _preceding(plan: Plan, peer: str) -> Iterator[str]:
    """Yield the peers on the cyclic walk backwards from a peer, until it is back at the peer, which is excluded."""
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
    """Return the last peer of a peer's subtree."""
    while below := plan.children(peer):
        peer = below[-1]
    return peer


def _subtrees_ending_at(plan: Plan, last: str) -> Iterator[str]:
    """Yield the peers whose subtree ends with the peer `last`."""
    if plan.children(last):
        return
    peer = last
    while peer != ROOT:
        yield peer
        above = plan.parent[peer]
        if plan.children(above)[-1] != peer:
            return
        peer = above
