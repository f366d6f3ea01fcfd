"""The plan: a tree of chains below the hub.

Guarantee: every `Plan` is valid. It has no loop and no unknown parent, a peer feeds at most `MAX_CHILDREN` others, and
a leaf feeds none. The constructor checks this in time linear in the number of peers, `changed` in time linear in the
change. A plan is immutable; the functions of `topology.plan_changes` make new plans from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

ROOT: Final = ""
"""The hub's id in a plan. No peer may have this id."""
MAX_CHILDREN: Final = 2
"""Most children of a peer. In a chain a peer feeds one other; it feeds two at a fork, as at a region's entry."""

Epoch: TypeAlias = tuple[int, int]
"""(hub incarnation, counter); the higher wins."""


class PlanError(ValueError):
    """The plan, or the requested change, would be invalid."""


class LoopError(PlanError):
    """A peer would become its own ancestor."""


class ParentFullError(PlanError):
    """The requested parent already feeds as many peers as it may, or is a leaf."""


@dataclass(frozen=True, slots=True)
class PlanMember:
    """A live peer as the planner sees it.

    `bps`: the rate in bits per second for receiving and for forwarding; `score`: 0 to 100; both are None if unmeasured.
    `leaf`: the peer receives and never forwards. `standing` (`topology.score_demotion`): 0 allows any place; 1:
    preferably not a head with peers behind it; 2: preferably behind all peers of better standing.
    """

    id: str
    region: str = ""
    bps: float | None = None
    score: float | None = None
    leaf: bool = False
    standing: int = 0

    def __post_init__(self) -> None:
        if self.id == ROOT:
            raise PlanError("a member's id must not be empty: that is the hub's place in a plan")
        if self.bps is not None and not (math.isfinite(self.bps) and self.bps >= 0):
            raise PlanError(f"member {self.id!r}: rate {self.bps!r} bits/s must be finite and at least 0")
        if self.score is not None and not math.isfinite(self.score):
            raise PlanError(f"member {self.id!r}: score {self.score!r} must be finite")


def by_id(members: Iterable[PlanMember]) -> dict[str, PlanMember]:
    """Return the members by id, sorted by id. Raises PlanError for a duplicate id."""
    ranked = sorted(members, key=lambda m: m.id)
    table = {m.id: m for m in ranked}
    if len(table) != len(ranked):
        twice = next(a.id for a, b in pairwise(ranked) if a.id == b.id)
        raise PlanError(f"member {twice!r} is listed twice")
    return table


@dataclass(frozen=True)
class Plan:
    """Every peer's parent (another peer or ROOT), and the leaves.

    Raises LoopError, ParentFullError or PlanError if the plan is invalid. `changed` makes a new plan and examines only
    the peers whose place changes.
    """

    epoch: Epoch
    parent: Mapping[str, str]
    leaves: frozenset[str] = frozenset()
    _parent: dict[str, str] = field(init=False, repr=False, compare=False)
    """`parent` without the read-only view, which takes ten times as long to copy."""
    _children: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    _depth: dict[str, int] = field(init=False, repr=False, compare=False)
    _tails: list[tuple[int, str]] = field(init=False, repr=False, compare=False)
    """(depth, id) of each forwarder without children, in ascending order: the places for newcomers."""

    def __post_init__(self) -> None:
        parent = dict(sorted(self.parent.items()))
        grouped: dict[str, list[str]] = {}
        for peer, above in parent.items():
            grouped.setdefault(above, []).append(peer)
        self._set(parent, {p: tuple(c) for p, c in grouped.items()}, {ROOT: 0})
        if ROOT in parent:
            raise PlanError("the hub has no parent in a plan")
        for peer, below in grouped.items():
            if peer != ROOT and peer not in parent:
                raise PlanError(f"peer {below[0]!r} hangs below {peer!r}, which is not in the plan")
            self._check_load(peer)
        if unknown := self.leaves - parent.keys():
            raise PlanError(f"leaf {min(unknown)!r} is not in the plan")
        self._sink(self.children(ROOT), len(parent))
        self._tails.extend(sorted((self._depth[p], p) for p in parent if p not in grouped and p not in self.leaves))

    def changed(
        self, epoch: Epoch, put: Mapping[str, str], gone: Iterable[str] = (), leaves: frozenset[str] | None = None
    ) -> Plan:
        """Return the plan with the peers of `put` below their new parents, and without the peers `gone`, whose children
        must be in `put`. Peers in `put` are newcomers, or move with their subtrees. Apart from copies, takes time
        proportional to the moved peers and their subtrees. Raises the same errors as the constructor.
        """
        new = object.__new__(Plan)
        object.__setattr__(new, "epoch", epoch)
        object.__setattr__(new, "leaves", self.leaves if leaves is None else leaves)
        parent, children = self._parent.copy(), self._children.copy()
        new._set(parent, children, self._depth.copy())
        dead = set(gone)
        if ROOT in put:
            raise PlanError("the hub has no parent in a plan")
        moved = {peer: above for peer, above in put.items() if parent.get(peer) != above}
        left: dict[str, set[str]] = {}
        came: dict[str, list[str]] = {}
        for peer in (*dead, *(p for p in moved if p in parent)):
            left.setdefault(parent.pop(peer), set()).add(peer)
        for peer, above in moved.items():
            parent[peer] = above
            came.setdefault(above, []).append(peer)
        for above in left.keys() | came.keys():
            stay = [c for c in children.get(above, ()) if c not in left.get(above, ())]
            children[above] = tuple(sorted(stay + came.get(above, [])))
        for peer in dead:
            del new._depth[peer]
            if below := children.pop(peer, ()):
                raise PlanError(f"peer {below[0]!r} hangs below {peer!r}, which is not in the plan")
        for peer, above in moved.items():
            if above != ROOT and above not in parent:
                raise PlanError(f"peer {peer!r} hangs below {above!r}, which is not in the plan")
        touched = {
            *moved.values(),
            *(self.parent[p] for p in dead),
            *(self.parent[p] for p in moved if p in self.parent),
        }
        if new.leaves is not self.leaves:
            touched |= new.leaves ^ self.leaves
            if unknown := new.leaves - parent.keys():
                raise PlanError(f"leaf {min(unknown)!r} is not in the plan")
        for peer in touched:
            new._check_load(peer)
        sunk = _below(children, moved)
        for peer in sunk:
            new._depth.pop(peer, None)
        new._sink([p for p in moved if parent[p] not in sunk], len(sunk))
        stale = {p for p in (*touched, *sunk, *dead) if p != ROOT}
        new._tails.extend(tail for tail in self._tails if tail[1] not in stale)
        new._tails.extend((new._depth[p], p) for p in stale - dead if not new.children(p) and p not in new.leaves)
        new._tails.sort()
        return new

    def under(self, epoch: Epoch) -> Plan:
        """Return the same plan under a different epoch."""
        new = object.__new__(Plan)
        new.__dict__.update(self.__dict__, epoch=epoch)
        return new

    def _set(self, parent: dict[str, str], children: dict[str, tuple[str, ...]], depth: dict[str, int]) -> None:
        object.__setattr__(self, "parent", MappingProxyType(parent))
        object.__setattr__(self, "_parent", parent)
        object.__setattr__(self, "_children", children)
        object.__setattr__(self, "_depth", depth)
        object.__setattr__(self, "_tails", [])

    def _check_load(self, peer: str) -> None:
        below = self._children.get(peer, ())
        if peer != ROOT and len(below) > (0 if peer in self.leaves else MAX_CHILDREN):
            kind = "a leaf" if peer in self.leaves else "a peer"
            raise ParentFullError(f"{kind}, {peer!r}, would feed {len(below)} others: {', '.join(below[:4])}")

    def _sink(self, level: Iterable[str], expected: int) -> None:
        """Set the depths of the peers in `level`, whose parents' depths are known, and of their subtrees. Raises
        LoopError unless these are `expected` peers in all.
        """
        depth, children = self._depth, self._children
        found = 0
        level = list(level)
        for peer in level:
            depth[peer] = depth[self.parent[peer]] + 1
        while level:
            found += len(level)
            below: list[str] = []
            for peer in level:
                if kids := children.get(peer):
                    deeper = depth[peer] + 1
                    for kid in kids:
                        depth[kid] = deeper
                    below += kids
            level = below
        if found != expected:
            lost = min(self.parent.keys() - depth.keys())
            raise LoopError(f"peer {lost!r} is on or below a loop and cannot be reached from the hub")

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All peers, parents before children, in a deterministic order."""
        order: list[str] = []
        level: tuple[str, ...] | list[str] = self.children(ROOT)
        while level:
            order += level
            level = [child for peer in level for child in self._children.get(peer, ())]
        return tuple(order)

    @property
    def tails(self) -> Sequence[tuple[int, str]]:
        """(depth, id) of each forwarder without children, the highest first."""
        return self._tails

    def __contains__(self, peer: object) -> bool:
        return peer in self.parent

    def __len__(self) -> int:
        return len(self.parent)

    def __hash__(self) -> int:
        return hash((self.epoch, self.leaves, frozenset(self.parent.items())))

    @property
    def feeds(self) -> Mapping[str, tuple[str, ...]]:
        """The children of each peer, and of ROOT. A peer without children may be missing."""
        return self._children

    def children(self, peer: str) -> tuple[str, ...]:
        """Return the children of `peer` (or ROOT), sorted by id; empty for a tail."""
        return self._children.get(peer, ())

    def depth_of(self, peer: str) -> int:
        """Return the number of hops from the hub: 0 for ROOT, 1 for a head."""
        return self._depth[peer]

    @property
    def depth(self) -> int:
        """Number of hops to the farthest peer; 0 for an empty plan."""
        return max(self._depth.values())

    def path(self, peer: str) -> tuple[str, ...]:
        """Return the ids from the chain's head down to `peer`, both included; the path of ROOT is empty."""
        steps: list[str] = []
        while peer != ROOT:
            steps.append(peer)
            peer = self.parent[peer]
        return tuple(reversed(steps))

    def subtree(self, peer: str) -> set[str]:
        """Return `peer` and all peers below it."""
        return _below(self._children, [peer])

    def backups(self, peer: str, limit: int | None = None) -> tuple[str, ...]:
        """Return the parents that `peer` may turn to when it loses its own: its other ancestors, nearest first, at most
        `limit`, then ROOT.
        """
        ancestors = self.path(peer)[-3::-1]
        return (*ancestors[:limit], ROOT)

    @cached_property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """The plan as chains; every peer is in exactly one. If a peer feeds two others, its chain continues into the
        taller subtree, and the other subtree starts a chain. Chains that start higher come first.
        """
        children = self._children
        height: dict[str, int] = {}
        heir: dict[str, str] = {}  # the child with which a peer's chain continues
        for peer in reversed(self.order):
            below = children.get(peer)
            if not below:
                height[peer] = 1
                continue
            first = below[0] if len(below) == 1 else min(below, key=lambda child: (-height[child], child))
            heir[peer] = first
            height[peer] = 1 + height[first]
        goes_on = set(heir.values())
        starts = [peer for peer in self.order if peer not in goes_on]
        chains: list[tuple[str, ...]] = []
        for start in starts:
            chain = [start]
            while (following := heir.get(chain[-1])) is not None:
                chain.append(following)
            chains.append(tuple(chain))
        return tuple(chains)


def _below(children: Mapping[str, tuple[str, ...]], peers: Iterable[str]) -> set[str]:
    """Return these peers and all peers below them."""
    found = set(peers)
    waiting = list(found)
    while waiting:
        fresh = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(fresh)
        waiting += fresh
    return found
