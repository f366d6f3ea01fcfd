"""Decides which artifacts lead a peer from its staged version to the newest.

Guarantees:

- The path is the fastest, as far as is known.
- A path that stops before the newest version is never mistaken for one that reaches it (``gap``).
- It never takes an engine back to an older version just because this peer or the mirror lost something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from p2pcast.codec.layout import Layout
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.artifact_path import Edge, Gap, find_gap
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.hub_orders import HubOrders
from rollout_node.control.saved_hub_state import SavedHubState
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.sync.catchup_choice import CatchupChoice
from rollout_node.sync.mirror_catalog import MirrorCatalog, NoMirror
from rollout_node.sync.parent_failover import ParentFailover
from rollout_node.sync.source_choice import needs_source


class PlannedNode(ArtifactHolder, Protocol):
    @property
    def layouts(self) -> Mapping[bytes, Layout]: ...

    @property
    def is_listed(self) -> Callable[[bytes], bool]:
        """Whether the hub's catalog lists an artifact."""


@dataclass(eq=False, repr=False, kw_only=True)
class VersionPlanner:
    state: ShadowState
    orders: HubOrders
    catalog: ArtifactCatalog
    mirror: MirrorCatalog | NoMirror
    node: PlannedNode
    parent_failover: ParentFailover
    store: ArtifactStore
    saved: SavedHubState
    squashes: CatchupChoice
    begun: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set once it is known which version is here, and so what has to be received."""
    news: Wakeup = field(init=False, default_factory=Wakeup)
    """Rings whenever the path may have changed."""

    def replan(self) -> None:
        """Called when the path may have changed."""
        self.news.notify()

    def path(self) -> list[Edge]:
        """The path from the staged version to the newest one to which the shadow may move."""
        staged, hold = self.state.staged, self.orders.hold
        if staged is not None and not self._is_anything_newer(staged):
            return []
        path = self.squashes.way(staged, self._edges_to(hold), self.state_bytes)
        return [] if self._is_regression(path) else path

    def gap(self) -> Gap | None:
        """Why no path leads to the newest version to which the shadow may move; None if one does."""
        staged = self.state.staged
        if staged is not None and not self._is_anything_newer(staged):
            return None
        return find_gap(staged, self._edges_to(self.orders.hold))

    def _edges_to(self, hold: Version | None) -> list[Edge]:
        return [e for e in self.edges() if hold is None or e.version <= hold]

    def _is_anything_newer(self, staged: Version) -> bool:
        """Whether any artifact, here or listed, leads to a version above the staged one. Called for each message."""
        return (
            any(edge.version > staged for edge in self.catalog.edges().values())
            or any(holding.open.version > staged for holding in self.node.holdings.values())
            or any(entry.version > staged for entry in self.mirror.entries.values())
        )

    def _is_regression(self, path: list[Edge]) -> bool:
        """Whether the path would end below the newest version staged here before. A mirror or this peer's disk may have
        lost versions, so such a path is followed only once the hub has listed its versions.
        """
        newest = self.saved.newest
        unsure = not self.catalog.listed or self.mirror.in_use
        return bool(path and unsure and newest is not None and path[-1].version < newest)

    def next_holding(self) -> Holding | None:
        """The holding of the first artifact on the path; None if the path is empty, or nothing of that artifact is
        here.
        """
        path = self.path()
        return self.node.holdings.get(path[0].artifact) if path else None

    def is_superseded(self, version: Version) -> bool:
        """Whether the artifact that leads on from the staged ``version`` is completely here, and ``version`` is not the
        target of the engines.
        """
        ahead = self.next_holding()
        return ahead is not None and ahead.finished and version != self.orders.target

    @property
    def idle_state(self) -> str:
        """The peer's activity while ``next_holding`` is None."""
        staged = self.state.staged
        if self.gap() is not None:
            return "stranded"
        if staged is None or self.path():
            return "waiting"
        return "held" if staged == self.orders.hold != self.orders.target else "current"

    def signed_digest(self, version: Version) -> int | None:
        """The digest of a version's state, from a manifest in the store or from the hub."""
        manifest = self.store.manifest(version)
        return self.states().get(version) if manifest is None else manifest.state

    def needed(self) -> frozenset[bytes]:
        """Artifacts that retention must keep: those on the path, and those leading past the version that is on hold."""
        onward = self.squashes.way(self.state.staged, self.edges(), self.state_bytes)
        return frozenset(e.artifact for e in (*self.path(), *onward))

    @property
    def state_bytes(self) -> int:
        """Size of a whole state; 0 if no layout is known."""
        shadow = self.state.shadow
        layouts = self.node.layouts.values() if shadow is None else [shadow.layout]
        return max((layout.nbytes for layout in layouts), default=0)

    def edges(self) -> Collection[Edge]:
        """All edges from version to version. For artifacts that are here, the size is the bytes still missing."""
        edges = {e.artifact: e for e in self.listed()} | {
            h.id: Edge(h.id, h.open.base, h.open.version, self._bytes_left(h))
            for h in self.node.holdings.values()
            if self._may_complete(h)
        }
        return edges.values()

    def listed(self) -> Collection[Edge]:
        """Artifacts that other nodes hold completely, as listed by the hub or a mirror."""
        use = self.mirror.in_use
        # Without the hub, its last catalog may list artifacts that no node holds any more, unless a parent is
        # connected.
        listed = self.catalog.edges() if not use or self.parent_failover.feeding is not None else {}
        return (listed | (self.mirror.edges() if use else {})).values()

    def listed_of(self, layout: Layout) -> list[Edge]:
        """The listed artifacts of this layout."""
        return [edge for edge in self.listed() if self.layout_of(edge.artifact) == layout.layout_id]

    def layout_of(self, artifact: bytes) -> bytes | None:
        """The layout of a listed artifact."""
        entry = self.catalog.get(artifact) or self.mirror.entries.get(artifact)
        return None if entry is None else entry.layout

    def _bytes_left(self, holding: Holding) -> int:
        """Bytes still missing. An artifact that is still being made has an unknown size, which counts as 0."""
        if holding.complete:
            return 0
        manifest, entry = holding.assembly.manifest, self.catalog.get(holding.id)
        whole = manifest.log if manifest is not None else entry.size if entry is not None else 0
        return max(0, whole - holding.artifact.held.count * holding.open.piece)

    def states(self) -> dict[Version, int]:
        """Digests of the known versions, from the hub and, while a mirror is in use, from signed records on the mirror
        and in the store.
        """
        if not self.mirror.in_use:
            return self.catalog.states()
        stored = {s.version: s.manifest.state for s in self.store.artifacts.values()}
        return stored | {e.version: e.state for e in self.mirror.entries.values()} | self.catalog.states()

    def whole(self) -> list[tuple[Version, tuple[bytes, int]]]:
        """Every listed version with its layout's id and its state's digest."""
        return self.catalog.whole() + [(e.version, (e.layout, e.state)) for e in self.mirror.entries.values()]

    def _may_complete(self, holding: Holding) -> bool:
        """Whether the artifact can still become complete. An artifact that a hub was making when it died is on no list,
        so it cannot complete once no source is sending it. The same is true of an artifact known only to a parent while
        the hub is connected.
        """
        return not holding.excerpt and (
            holding.irrevocable
            or (not needs_source(holding) and self.node.is_listed(holding.id))
            or self.catalog.get(holding.id) is not None
            or (self.mirror.in_use and holding.id in self.mirror.entries)
        )
