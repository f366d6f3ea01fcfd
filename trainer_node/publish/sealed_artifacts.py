"""Artifacts in the hub's store, beside the versions on their way: added to the node, and removed by retention.

Promise: retention removes no artifact that a joined peer needs to reach the newest version, or that is being sent.
Where a version finds no room, squashes go first that are not being sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Work
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.child import Child
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import Store, Stored
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer

logger = logging.getLogger("p2pcast.hub")


class SealedArtifacts:
    """``staged``: the version that each joined peer has. ``children``: the peers that the hub feeds."""

    def __init__(
        self,
        node: Node,
        store: Store,
        staging: Staging,
        announcer: ArtifactAnnouncer,
        *,
        staged: Callable[[], Iterable[Version | None]],
        children: Callable[[], Iterable[Child]],
        store_changed: Callable[[], None],
        later: Callable[[Work, str], None],
    ) -> None:
        """``later`` starts a background task."""
        self._node = node
        self._store = store
        self._staging = staging
        self._announcer = announcer
        self._staged = staged
        self._children = children
        self._store_changed = store_changed
        self._later = later

    def add(self, stored: Stored) -> None:
        """Announce an artifact that was made beside live traffic, then apply retention."""
        self._announcer.announce([self._node.add_stored(stored.assembly, self._store.open_log(stored))])
        self._later(self.retain, f"retention after {stored.version}")
        self._store_changed()

    async def discard(self, holding: Holding) -> None:
        """The disk has damaged or lost a part of an artifact: no peer is told of it any more. Raises LocalError."""
        if holding.durable and self._store.holds(holding.id):
            logger.error("the disk has damaged or lost the artifact of %s: it is removed", holding.open.version)
            self._node.forget(holding.id)
            await self._staging.run(self._store.discard, holding.id)
            self._announcer.withdraw([holding.id])
            self._store_changed()

    async def retain(self) -> None:
        """Remove what retention no longer keeps. Raises LocalError."""
        self._forget(await self._staging.run(self._store.retain, self.needed()))
        self._store_changed()

    async def make_room(self, need_bytes: float) -> None:
        """Give up squashes until so many bytes are free, or none is left: peers take the deltas. Raises LocalError."""
        if removed := await self._staging.run(self._store.make_room, need_bytes, self._sent()):
            size = sum(stored.manifest.log for stored in removed)
            logger.warning(
                "%s has little room: %d squashes are given up (%.1f MB)", self._store.root, len(removed), size / 1e6
            )
            self._forget(removed)
            self._store_changed()

    def _forget(self, removed: Sequence[Stored]) -> None:
        for stored in removed:
            self._node.forget(stored.id)
        if removed:
            self._announcer.withdraw([stored.id for stored in removed])

    def needed(self) -> frozenset[bytes]:
        """Artifacts on the paths of joined peers to the newest version, and artifacts that are being sent."""
        edges = [Edge(s.id, s.base, s.version, s.manifest.log) for s in self._store.artifacts.values()]
        paths = [cheapest_path(version, edges) for version in set(self._staged())]
        return frozenset(edge.artifact for path in paths for edge in path) | self._sent()

    def _sent(self) -> frozenset[bytes]:
        return frozenset(schedule.artifact.id for child in self._children() for schedule in child.schedules)
