"""Whom a peer turns to when nobody above it answers, the hub included: what the swarm holds is completed by exchanging it sideways.

Every peer knows the next ones behind its own branch, in the order in which a walk over the plan meets them, round and round. Those who have lost all above
them (orphans) each receive from the first of theirs that answers, and that is an orphan, too: if a peer above it lived, the walk would have met that one
first, or it would stand above both. So the orphans form one ring, and what any of them holds comes to all. Each has one source, to which it says what it
holds: so no piece is sent twice, although a ring is a loop.
"""

from __future__ import annotations

from typing import Final

from topology.tree import ROOT, Plan

NEIGHBOURS: Final = 4
"""As many in a row may have died."""
_LOOKED_AT: Final = 8 * NEIGHBOURS
"""Places that are looked at for one peer at most: in a plan of one long chain there is nobody beside."""


def sideways(plan: Plan, limit: int = NEIGHBOURS) -> dict[str, tuple[str, ...]]:
    """Every peer's neighbours, in the order in which it tries them: neither above it nor below it, and no leaves."""
    walk: list[str] = []
    end: dict[str, int] = {}
    """Peer → where its branch ends in the walk."""
    above: list[tuple[str, bool]] = [(peer, False) for peer in reversed(plan.children(ROOT))]
    while above:
        peer, done = above.pop()
        if done:
            end[peer] = len(walk)
        else:
            walk.append(peer)
            above.append((peer, True))
            above += [(child, False) for child in reversed(plan.children(peer))]
    found: dict[str, tuple[str, ...]] = {}
    for at, peer in enumerate(walk):
        beside: list[str] = []
        for step in range(min(len(walk) - (end[peer] - at), _LOOKED_AT)):
            place = (end[peer] + step) % len(walk)
            other = walk[place]
            if not place <= at < end[other] and other not in plan.leaves:
                beside.append(other)
                if len(beside) == limit:
                    break
        found[peer] = tuple(beside)
    return found
