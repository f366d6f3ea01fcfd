"""Which artifacts lead a peer from the version that it has staged to the newest.

Promises:

- The way is the quickest by what is known.
- A way that ends before the newest version is never taken for one that has arrived (``gap``).
- It leads no engine back to an older version because of what this peer or the mirror alone lost.
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
    """Set once it is known which version lies here, and so what has to come over the wire."""
    news: Wakeup = field(init=False, default_factory=Wakeup)
    """Rings for whatever may have changed the way."""

    def replan(self) -> None:
        """The way may have changed."""
        self.news.notify()

    def path(self) -> list[Edge]:
        """From the version staged to the newest that the shadow may go to."""
        staged, hold = self.state.staged, self.orders.hold
        if staged is not None and not self._is_anything_newer(staged):
            return []
        path = self.squashes.way(staged, self._edges_to(hold), self.state_bytes)
        return [] if self._is_regression(path) else path

    def gap(self) -> Gap | None:
        """Why no way leads to the newest version that the shadow may go to; None while one does."""
        staged = self.state.staged
        if staged is not None and not self._is_anything_newer(staged):
            return None
        return find_gap(staged, self._edges_to(self.orders.hold))

    def _edges_to(self, hold: Version | None) -> list[Edge]:
        return [e for e in self.edges() if hold is None or e.version <= hold]

    def _is_anything_newer(self, staged: Version) -> bool:
        """Whether any artifact, here or listed, leads to a version above the staged one. Asked at each message."""
        return (
            any(edge.version > staged for edge in self.catalog.edges().values())
            or any(holding.open.version > staged for holding in self.node.holdings.values())
            or any(entry.version > staged for entry in self.mirror.entries.values())
        )

    def _is_regression(self, path: list[Edge]) -> bool:
        """A mirror may show less than before, and so may this peer's disk. A path that ends below the newest version
        staged here is followed only once the hub has listed its versions.
        """
        newest = self.saved.newest
        unsure = not self.catalog.listed or self.mirror.in_use
        return bool(path and unsure and newest is not None and path[-1].version < newest)

    def next_holding(self) -> Holding | None:
        """The holding of the first artifact on the path; None where the path ends here, or nothing of the artifact is
        here.
        """
        path = self.path()
        return self.node.holdings.get(path[0].artifact) if path else None

    def is_superseded(self, version: Version) -> bool:
        """Whether the artifact that leads on from the staged ``version`` is here as a whole, and engines are not told
        to switch to ``version``.
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
        """The digest of a version's state: from a manifest in the store, or as the hub said."""
        manifest = self.store.manifest(version)
        return self.states().get(version) if manifest is None else manifest.state

    def needed(self) -> frozenset[bytes]:
        """Artifacts that retention must leave: the path, and what leads past the version where the shadow is held."""
        onward = self.squashes.way(self.state.staged, self.edges(), self.state_bytes)
        return frozenset(e.artifact for e in (*self.path(), *onward))

    @property
    def state_bytes(self) -> int:
        """Size of a whole state; 0 while no layout is known."""
        shadow = self.state.shadow
        layouts = self.node.layouts.values() if shadow is None else [shadow.layout]
        return max((layout.nbytes for layout in layouts), default=0)

    def edges(self) -> Collection[Edge]:
        """All ways from version to version, those that lie here with the bytes that are still missing."""
        edges = {e.artifact: e for e in self.listed()} | {
            h.id: Edge(h.id, h.open.base, h.open.version, self._bytes_left(h))
            for h in self.node.holdings.values()
            if self._may_complete(h)
        }
        return edges.values()

    def listed(self) -> Collection[Edge]:
        """Artifacts that other nodes hold whole, as listed by the hub or a mirror."""
        use = self.mirror.in_use
        # The catalog of a hub that is gone names what no node may hold any more, unless there is a parent.
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
        """Bytes that are still missing. The size of an artifact that is still being made is unknown: it counts as 0."""
        if holding.complete:
            return 0
        manifest, entry = holding.assembly.manifest, self.catalog.get(holding.id)
        whole = manifest.log if manifest is not None else entry.size if entry is not None else 0
        return max(0, whole - holding.artifact.held.count * holding.open.piece)

    def states(self) -> dict[Version, int]:
        """Digests of the known versions: by the hub; and while a mirror is in use, by signed records there and in the
        store here.
        """
        if not self.mirror.in_use:
            return self.catalog.states()
        stored = {s.version: s.manifest.state for s in self.store.artifacts.values()}
        return stored | {e.version: e.state for e in self.mirror.entries.values()} | self.catalog.states()

    def whole(self) -> list[tuple[Version, tuple[bytes, int]]]:
        """Every listed version with its layout's id and its state's digest."""
        return self.catalog.whole() + [(e.version, (e.layout, e.state)) for e in self.mirror.entries.values()]

    def _may_complete(self, holding: Holding) -> bool:
        """Whether the artifact can become whole. An artifact that a hub was making when it died is on no list, and
        cannot complete once no source sends it. The same holds for an artifact known only to a parent, while the hub
        is connected.
        """
        return not holding.excerpt and (
            holding.irrevocable
            or (not needs_source(holding) and self.node.is_listed(holding.id))
            or self.catalog.get(holding.id) is not None
            or (self.mirror.in_use and holding.id in self.mirror.entries)
        )
