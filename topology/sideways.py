"""Whom a peer turns to when nobody above it answers, the hub included: what the swarm holds is completed by exchanging it sideways.

Every peer knows the next ones behind its own branch, in the order in which a walk over the plan meets them, round and round. Those who have lost all above
them (orphans) each receive from the first of theirs that answers, and that is an orphan, too: if a peer above it lived, the walk would have met that one
first, or it would stand above both. So the orphans form one ring, and what any of them holds comes to all. Each has one source, to which it says what it
holds: so no piece is sent twice, although a ring is a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from topology.tree import ROOT, Plan

NEIGHBOURS: Final = 4
"""As many in a row may have died."""
_LOOKED_AT: Final = 8 * NEIGHBOURS
"""Places that are looked at for one peer at most: in a plan of one long chain there is nobody beside."""


def sideways(plan: Plan, peer: str, limit: int = NEIGHBOURS) -> tuple[str, ...]:
    """Its neighbours, in the order in which it tries them: neither above it nor below it, and no leaves. Takes time in proportion to a chain's length at most."""
    above = set(plan.path(peer))
    window = islice(_behind(plan, peer), _LOOKED_AT)
    return tuple(islice((other for other in window if other not in above and other not in plan.leaves), limit))


def concerned(before: Plan, after: Plan, touched: Iterable[str]) -> set[str]:
    """Peers of `after` whose parent, ancestors behind it, or neighbours may be others than in `before`; perhaps a few more.

    `touched`: who came, went, has another parent, or has become a leaf or ceased to be one. Takes time in proportion to them and to chains' lengths.
    """
    found: set[str] = set()
    for peer in touched:
        for plan in (before, after):
            if peer in plan:
                found.update(plan.branch(peer))
                for earlier in islice(_before(plan, peer), _LOOKED_AT):
                    found.update(_ending(plan, earlier))
    return {peer for peer in found if peer in after}


def _behind(plan: Plan, peer: str) -> Iterator[str]:
    """The walk over the plan from the end of a peer's branch, round to the peer."""
    at = _past(plan, peer)
    while at != peer:
        yield at
        below = plan.children(at)
        at = below[0] if below else _past(plan, at)


def _past(plan: Plan, peer: str) -> str:
    """The first behind a peer's branch."""
    while peer != ROOT:
        above = plan.parent[peer]
        beside = plan.children(above)
        place = beside.index(peer) + 1
        if place < len(beside):
            return beside[place]
        peer = above
    return plan.children(ROOT)[0]


def _before(plan: Plan, peer: str) -> Iterator[str]:
    """The walk backwards from a peer, round to where it began."""
    at = peer
    while True:
        above = plan.parent[at]
        place = plan.children(above).index(at)
        # Of the first head: from the last one's branch.
        at = _last(plan, plan.children(above)[place - 1]) if above == ROOT or place > 0 else above
        if at == peer:
            return
        yield at


def _last(plan: Plan, peer: str) -> str:
    """The last of a peer's branch."""
    while below := plan.children(peer):
        peer = below[-1]
    return peer


def _ending(plan: Plan, last: str) -> Iterator[str]:
    """Those whose branch ends with this one."""
    if plan.children(last):
        return
    peer = last
    while peer != ROOT:
        yield peer
        above = plan.parent[peer]
        if plan.children(above)[-1] != peer:
            return
        peer = above
