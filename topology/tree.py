"""Who feeds whom: a plan is a tree under the hub whose branches are chains.

Promise: a `Plan` that exists is sound. It holds no loop and no unknown parent, a peer feeds at most `MAX_CHILDREN` others, and a leaf feeds
nobody; the constructor refuses anything else, in time linear in the number of peers. A plan never changes; the functions of `topology.rebuild`
make new ones from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

ROOT: Final = ""
"""The hub's place in a plan. No peer may have this id."""
MAX_CHILDREN: Final = 2
"""A peer on a plain chain feeds one other; two where chains part, as at the head of a region."""

Epoch: TypeAlias = tuple[int, int]
"""(hub incarnation, counter); the higher wins."""


class PlanError(ValueError):
    """The plan, or the change asked for, would break what a plan promises."""


class LoopError(PlanError):
    """A peer would come to be its own ancestor."""


class FullError(PlanError):
    """The parent asked for feeds as many as it may (a leaf: none)."""


@dataclass(frozen=True, slots=True)
class Member:
    """One live peer as the planner sees it.

    `bps` is the rate in bits per second that it can take in and pass on, `score` its score (0-100); None where nothing has been measured. A
    `leaf` receives and never forwards.
    """

    id: str
    region: str = ""
    bps: float | None = None
    score: float | None = None
    leaf: bool = False

    def __post_init__(self) -> None:
        if self.id == ROOT:
            raise PlanError("a member's id must not be empty: that is the hub's place in a plan")
        if self.bps is not None and not (math.isfinite(self.bps) and self.bps >= 0):
            raise PlanError(f"member {self.id!r}: rate {self.bps!r} bits/s must be finite and at least 0")
        if self.score is not None and not math.isfinite(self.score):
            raise PlanError(f"member {self.id!r}: score {self.score!r} must be finite")


def by_id(members: Iterable[Member]) -> dict[str, Member]:
    """Members under their ids, in the order of the ids. Raises PlanError when an id comes twice."""
    ranked = sorted(members, key=lambda m: m.id)
    table = {m.id: m for m in ranked}
    if len(table) != len(ranked):
        twice = next(a.id for a, b in pairwise(ranked) if a.id == b.id)
        raise PlanError(f"member {twice!r} is listed twice")
    return table


@dataclass(frozen=True)
class Plan:
    """Every peer's parent (another peer or ROOT), and which peers are leaves.

    Raises LoopError, FullError or PlanError when these do not make a sound plan.
    """

    epoch: Epoch
    parent: Mapping[str, str]
    leaves: frozenset[str] = frozenset()
    order: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """All peers, parents before children, deterministic."""
    _children: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    _depth: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parent = dict(sorted(self.parent.items()))
        grouped: dict[str, list[str]] = {}
        for peer, above in parent.items():
            if peer == ROOT:
                raise PlanError("the hub has no parent in a plan")
            if above != ROOT and above not in parent:
                raise PlanError(f"peer {peer!r} hangs below {above!r}, which is not in the plan")
            grouped.setdefault(above, []).append(peer)
        if unknown := self.leaves - parent.keys():
            raise PlanError(f"leaf {min(unknown)!r} is not in the plan")
        for peer, below in grouped.items():
            if peer != ROOT and len(below) > (0 if peer in self.leaves else MAX_CHILDREN):
                kind = "a leaf" if peer in self.leaves else "a peer"
                raise FullError(f"{kind}, {peer!r}, would feed {len(below)} others: {', '.join(below[:4])}")
        order: list[str] = []
        depth: dict[str, int] = {ROOT: 0}
        level = [ROOT]
        while level:
            below = [child for peer in level for child in grouped.get(peer, ())]
            for child in below:
                depth[child] = depth[parent[child]] + 1
            order += below
            level = below
        if len(order) != len(parent):
            lost = min(parent.keys() - depth.keys())
            raise LoopError(f"peer {lost!r} is on or below a loop and cannot be reached from the hub")
        object.__setattr__(self, "parent", MappingProxyType(parent))
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "_children", {p: tuple(c) for p, c in grouped.items()})
        object.__setattr__(self, "_depth", depth)

    def __contains__(self, peer: object) -> bool:
        return peer in self.parent

    def __len__(self) -> int:
        return len(self.parent)

    def __hash__(self) -> int:
        return hash((self.epoch, self.leaves, tuple(self.parent.items())))

    def children(self, peer: str) -> tuple[str, ...]:
        """Whom `peer` (or ROOT) feeds, by id; empty for a tail."""
        return self._children.get(peer, ())

    def depth_of(self, peer: str) -> int:
        """Hops from the hub: 0 for ROOT, 1 for a head."""
        return self._depth[peer]

    @property
    def depth(self) -> int:
        """Hops to the farthest peer; 0 for an empty plan."""
        return self._depth[self.order[-1]] if self.order else 0

    def path(self, peer: str) -> tuple[str, ...]:
        """Ids from the head of the chain down to `peer`, both included; ROOT has an empty path."""
        steps: list[str] = []
        while peer != ROOT:
            steps.append(peer)
            peer = self.parent[peer]
        return tuple(reversed(steps))

    def backups(self, peer: str, limit: int | None = None) -> tuple[str, ...]:
        """Where `peer` turns when its parent is lost: its other ancestors, nearest first, at most `limit` of them, and ROOT at the end."""
        ancestors = self.path(peer)[-3::-1]
        return (*ancestors[:limit], ROOT)

    @cached_property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """The plan cut into chains: every peer is in exactly one. Where a peer feeds two, the chain goes on into the taller branch and the
        other starts a chain of its own. Chains that start higher come first."""
        height: dict[str, int] = {}
        for peer in reversed(self.order):
            height[peer] = 1 + max((height[c] for c in self.children(peer)), default=0)
        chains: list[tuple[str, ...]] = []
        starts = [peer for peer in self.order if self._starts_chain(peer, height)]
        for start in starts:
            chain = [start]
            while below := self.children(chain[-1]):
                chain.append(_heir(below, height))
            chains.append(tuple(chain))
        return tuple(chains)

    def _starts_chain(self, peer: str, height: Mapping[str, int]) -> bool:
        above = self.parent[peer]
        return above == ROOT or _heir(self.children(above), height) != peer


def _heir(below: tuple[str, ...], height: Mapping[str, int]) -> str:
    return min(below, key=lambda child: (-height[child], child))
