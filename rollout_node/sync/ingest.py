"""Artifacts received by a peer's node: where they are stored, how they become durable, and what is measured.

Guarantees:

- An artifact counts as durable only once it is sealed in the store.
- It is sealed there only once the hub is known to have the version on its own disk, so engines may serve what a store
  holds.
- Retention removes nothing that is needed on the path to the newest version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from p2pcast.artifact.signed_records import Open
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import P2PCastError
from p2pcast.process.background_tasks import Work
from p2pcast.process.shortages import shortage
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import NodeObserver, Parent
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.artifact_store import ArtifactStore, Stored
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.freshness import Freshness
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.missing_versions import MissingVersions
from rollout_node.sync.version_path import VersionPlanner
from rollout_node.timeline import Timeline


class NodeEvents:
    """A ``NodeOwner`` that is created before its node: it creates logs in the store, and passes events to observers."""

    def __init__(self, store: ArtifactStore) -> None:
        self.observers: list[NodeObserver] = []
        self._store = store

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        return self._store.begin_excerpt(open_) if excerpt else self._store.begin(open_, layout, resumable=True)

    def on_opened(self, holding: Holding) -> None:
        for observer in self.observers:
            observer.on_opened(holding)

    def on_complete(self, holding: Holding) -> None:
        for observer in self.observers:
            observer.on_complete(holding)

    def on_aborted(self, holding: Holding) -> None:
        for observer in self.observers:
            observer.on_aborted(holding)

    def on_offered(self, upstream: Parent) -> None:
        for observer in self.observers:
            observer.on_offered(upstream)

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None:
        for observer in self.observers:
            observer.on_upstream_lost(upstream, error)


class IngestNode(Protocol):
    """The part of the node (p2pcast.relay.node) that ``Ingest`` acts on."""

    @property
    def error(self) -> asyncio.Future[None]:
        """A future that fails if the store fails."""

    def confirm(self, holding: Holding, signed: bytes) -> None:
        """Accept the hub's durable record. Raises IntegrityError."""

    def forget(self, artifact: bytes) -> None:
        """Drop an artifact that retention removed from the store."""


@dataclass(eq=False, repr=False, kw_only=True)
class Ingest:
    """A ``NodeObserver``. ``on_transfer`` receives the number of bytes that a transfer brought, and its seconds."""

    node: IngestNode
    store: ArtifactStore
    freshness: Freshness
    missing_versions: MissingVersions
    timeline: Timeline
    planner: VersionPlanner
    catalog: ArtifactCatalog
    removal: ArtifactRemoval
    on_transfer: Callable[[int, float], None]
    hub: HubSession
    blocking: Callable[..., Awaitable[Any]]
    background: Callable[[Work, str], None]

    def on_opened(self, holding: Holding) -> None:
        if holding.excerpt:
            return
        self.freshness.note_version(holding.open.version, holding.opened_at)
        self.missing_versions.on_opened(holding)
        self.timeline.receiving(holding.open.version, holding.open.base, holding.opened_at)
        self.planner.replan()

    def on_complete(self, holding: Holding) -> None:
        took_s = holding.took_s
        self.timeline.received(holding.open.version, took_s)
        if holding.assembly.manifest is not None and took_s > 0:
            self.on_transfer(max(0, holding.assembly.manifest.log - holding.had_bytes), took_s)
        entry = self.catalog.get(holding.id)
        if entry is not None and entry.durable is not None:
            # The hub confirmed before the seal arrived, so a parent that withholds the record delays no version.
            self.node.confirm(holding, entry.durable)
        self.background(partial(self._seal, holding), f"seal {holding.open.version}")

    async def _seal(self, holding: Holding) -> None:
        try:
            if not await holding.until_confirmed():
                return
            stored: Stored = await self.blocking(self.store.seal, holding.log, holding.assembly)
            if not holding.durable:
                holding.seal()
            needed = self.planner.needed() | {stored.id}
            gone: list[Stored] = await self.blocking(self.store.retain, needed)
            for each in gone:
                self.node.forget(each.id)
        except P2PCastError as error:
            if shortage(error) is not None:
                raise
            if not self.node.error.done():
                self.node.error.set_exception(error)
        self.planner.replan()

    def on_aborted(self, holding: Holding) -> None:
        self.removal.remove_aborted(holding)
        if not holding.excerpt:
            self.timeline.aborted(holding.open.version)
            self.planner.replan()

    def on_offered(self, upstream: Parent) -> None:
        if upstream.live and not upstream.beside and not self.hub.connected:
            # Without the hub, no catalog lists new versions, but the parent's offers are signed too.
            upstream.want_newer()
        self.planner.replan()

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None:
        self.planner.replan()
