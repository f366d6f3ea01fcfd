"""A plan in which everybody can be linked to its parent.

The planner's own rules know nothing of addresses. Whatever plan they propose is mended here before it is judged: who cannot be linked to its parent is hung
elsewhere, with all that hangs below it, and nobody else moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from topology.tree import MAX_CHILDREN, ROOT, Plan

Links: TypeAlias = Callable[[str, str], bool]
"""(above, below): whether the one may feed the other. Of ROOT it is always true."""


def mend(plan: Plan, links: Links, chains: int) -> Plan:
    """Under the old epoch; the plan itself when nothing is wrong with it.

    Who has to move begins a chain while there are fewer than ``chains``, else goes to the highest tail that it can be linked to, else beside a leaf or where a
    second child does least harm (as low as possible), else to the hub.
    """
    for peer in plan.order:
        above = plan.parent[peer]
        if above != ROOT and not links(above, peer):
            plan = plan.changed(plan.epoch, {peer: _place(plan, peer, links, chains)})
    return plan


def _place(plan: Plan, peer: str, links: Links, chains: int) -> str:
    if len(plan.children(ROOT)) < chains:
        return ROOT
    below = plan.branch(peer)
    for _, tail in plan.tails:
        if tail not in below and links(tail, peer):
            return tail
    seconds = [
        (not plan.leaves.issuperset(children), -plan.depth_of(other), other)
        for other in plan.order
        if 0 < len(children := plan.children(other)) < MAX_CHILDREN
        and other not in below
        and other not in plan.leaves
        and links(other, peer)
    ]
    return min(seconds)[2] if seconds else ROOT
