"""Artifacts received at a peer's node: where they are put, how they become durable, and what is measured.

Promises:

- An artifact counts as durable once it is sealed in the store, and not before.
- It is sealed there only once the hub is known to hold its version on its own disk, so engines may serve what a store
  holds.
- Retention takes nothing that the way to the newest version needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from p2pcast.artifact.signed_records import Open
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import P2PCastError
from p2pcast.process.background_tasks import Work
from p2pcast.process.shortages import shortage
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import NodeObserver, Parent
from p2pcast.store.artifact_log import Log
from p2pcast.store.artifact_store import Store, Stored
from rollout_node.control.artifact_catalog import Catalog
from rollout_node.control.freshness import Freshness
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.missing_versions import MissingVersions
from rollout_node.sync.version_path import VersionPlanner
from rollout_node.timeline import Timeline


class NodeEvents:
    """A ``NodeOwner``, made before its node: logs are made in the store, and observers get everything else."""

    def __init__(self, store: Store) -> None:
        self.observers: list[NodeObserver] = []
        self._store = store

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> Log:
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


class ReceivingNode(Protocol):
    """The node (p2pcast.relay.node), as far as ``Ingest`` acts on it."""

    @property
    def error(self) -> asyncio.Future[None]:
        """Fails when the store fails."""

    def confirm(self, holding: Holding, signed: bytes) -> None:
        """Take the hub's durable record. Raises IntegrityError."""

    def forget(self, artifact: bytes) -> None:
        """Drop an artifact that retention removed from the store."""


class Ingest:
    """A ``NodeObserver``. ``on_transfer`` gets the bytes that an artifact brought and the seconds that it took."""

    def __init__(
        self,
        *,
        node: ReceivingNode,
        store: Store,
        freshness: Freshness,
        missing_versions: MissingVersions,
        timeline: Timeline,
        planner: VersionPlanner,
        catalog: Catalog,
        removal: ArtifactRemoval,
        on_transfer: Callable[[int, float], None],
        hub: HubSession,
        blocking: Callable[..., Awaitable[Any]],
        background: Callable[[Work, str], None],
    ) -> None:
        self._node = node
        self._store = store
        self._freshness = freshness
        self._missing_versions = missing_versions
        self._timeline = timeline
        self._planner = planner
        self._catalog = catalog
        self._removal = removal
        self._on_transfer = on_transfer
        self._hub = hub
        self._blocking = blocking
        self._background = background

    def on_opened(self, holding: Holding) -> None:
        if holding.excerpt:
            return
        self._freshness.note_version(holding.open.version, holding.opened_at)
        self._missing_versions.on_opened(holding)
        self._timeline.receiving(holding.open.version, holding.open.base, holding.opened_at)
        self._planner.replan()

    def on_complete(self, holding: Holding) -> None:
        took_s = holding.took_s
        self._timeline.received(holding.open.version, took_s)
        if holding.assembly.manifest is not None and took_s > 0:
            self._on_transfer(max(0, holding.assembly.manifest.log - holding.had_bytes), took_s)
        entry = self._catalog.get(holding.id)
        if entry is not None and entry.durable is not None:
            # The hub confirmed before the seal came. A parent that withholds the record holds up no version.
            self._node.confirm(holding, entry.durable)
        self._background(partial(self._seal, holding), f"seal {holding.open.version}")

    async def _seal(self, holding: Holding) -> None:
        try:
            if not await holding.until_confirmed():
                return
            stored: Stored = await self._blocking(self._store.seal, holding.log, holding.assembly)
            if not holding.durable:
                holding.seal()
            needed = self._planner.needed() | {stored.id}
            gone: list[Stored] = await self._blocking(self._store.retain, needed)
            for each in gone:
                self._node.forget(each.id)
        except P2PCastError as error:
            if shortage(error) is not None:
                raise
            if not self._node.error.done():
                self._node.error.set_exception(error)
        self._planner.replan()

    def on_aborted(self, holding: Holding) -> None:
        self._removal.remove_aborted(holding)
        if not holding.excerpt:
            self._timeline.aborted(holding.open.version)
            self._planner.replan()

    def on_offered(self, upstream: Parent) -> None:
        if upstream.live and not upstream.beside and not self._hub.connected:
            # Without the hub no catalog names new versions. The parent's offers are signed all the same.
            upstream.want_newer()
        self._planner.replan()

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None:
        self._planner.replan()
