"""Adds artifacts to the hub's store that are made next to the published versions, and applies retention.

Guarantee: retention removes no artifact that a joined peer needs to reach the newest version, or that is being sent.
If a version finds no space, squashes that are not being sent are removed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Work
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.child import Child
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore, Stored
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer

logger = logging.getLogger("p2pcast.hub")


@dataclass(eq=False, repr=False)
class SealedArtifacts:
    """``staged``: the version that each joined peer has. ``children``: the peers that the hub feeds. ``later`` starts a
    background task.
    """

    node: Node
    store: ArtifactStore
    staging: Staging
    announcer: ArtifactAnnouncer
    _: KW_ONLY
    staged: Callable[[], Iterable[Version | None]]
    children: Callable[[], Iterable[Child]]
    store_changed: Callable[[], None]
    later: Callable[[Work, str], None]

    def add(self, stored: Stored) -> None:
        """Announce an artifact that was made in the background, then apply retention."""
        self.announcer.announce([self.node.add_stored(stored.assembly, self.store.open_log(stored))])
        self.later(self.retain, f"retention after {stored.version}")
        self.store_changed()

    async def discard(self, holding: Holding) -> None:
        """Remove an artifact that the disk damaged or lost, so that it is no longer announced. Raises LocalError."""
        if holding.durable and self.store.holds(holding.id):
            logger.error("the disk has damaged or lost the artifact of %s: it is removed", holding.open.version)
            self.node.forget(holding.id)
            await self.staging.run(self.store.discard, holding.id)
            self.announcer.withdraw([holding.id])
            self.store_changed()

    async def retain(self) -> None:
        """Apply retention: remove artifacts that are no longer needed. Raises LocalError."""
        self._forget(await self.staging.run(self.store.retain, self.needed()))
        self.store_changed()

    async def make_room(self, need_bytes: float) -> None:
        """Remove squashes until this many bytes are free, or none is left; peers use the deltas. Raises LocalError."""
        if removed := await self.staging.run(self.store.make_room, need_bytes, self._sent()):
            size = sum(stored.manifest.log for stored in removed)
            logger.warning(
                "%s has little room: %d squashes are given up (%.1f MB)", self.store.root, len(removed), size / 1e6
            )
            self._forget(removed)
            self.store_changed()

    def _forget(self, removed: Sequence[Stored]) -> None:
        for stored in removed:
            self.node.forget(stored.id)
        if removed:
            self.announcer.withdraw([stored.id for stored in removed])

    def needed(self) -> frozenset[bytes]:
        """The artifacts on joined peers' paths to the newest version, and those that are being sent."""
        edges = [Edge(s.id, s.base, s.version, s.manifest.log) for s in self.store.artifacts.values()]
        paths = [cheapest_path(version, edges) for version in set(self.staged())]
        return frozenset(edge.artifact for path in paths for edge in path) | self._sent()

    def _sent(self) -> frozenset[bytes]:
        return frozenset(schedule.artifact.id for child in self.children() for schedule in child.schedules)
