"""Versions that the hub has sealed and this peer's parent does not send. They are pulled elsewhere, and reported to the
hub (``topology.withholding``).

Guarantees:

- A parent that withholds a version delays it for at most ``WITHHELD_S`` plus the time for two pieces on the slowest
  link. This covers a parent that opens a version but sends nothing, only a part or no seal, and one that opens nothing.
- A parent that sends slowly stays the parent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

from p2pcast.ground import limits
from p2pcast.relay.artifact_path import Edge
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.relay.upstream import Upstream
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.parent_failover import ParentFailover
from rollout_node.sync.stalls import StallRow, Stalls
from rollout_node.timeline import Timeline

logger = logging.getLogger("p2pcast.peer")

WITHHELD_S = 10.0
"""Seconds without progress before a sealed artifact is pulled elsewhere. Peers leave a dead parent within a second, and
a lagging parent keeps sending, so no honest parent pauses for this long.
"""
SLOWEST_BYTES_S = 125_000.0
"""1 Mbit/s, the slowest supported link; on it, a single piece takes long without the parent having stalled."""
ROUND_TRIPS = 8
MISSES = 3
"""This peer reports a parent that fails to open this many of the last `REMEMBERED` sealed versions."""
REMEMBERED = 8
COMPLAINT_S = 5.0
"""Seconds for which a complaint stays in every report even if the version arrives, because it may excuse this peer."""


class PausableNode(ArtifactHolder, Protocol):
    @property
    def paused(self) -> bool:
        """Whether the node has stopped reading from its parents."""


class MissingVersions:
    """Finds and reports withheld versions. The hub as a parent is never reported to itself."""

    def __init__(
        self,
        catalog: ArtifactCatalog,
        node: PausableNode,
        parent_failover: ParentFailover,
        timeline: Timeline,
        hub: HubSession,
    ) -> None:
        self.withheld = 0
        """Number of versions that a parent withheld."""
        self._catalog = catalog
        self._node = node
        self._parent_failover = parent_failover
        self._timeline = timeline
        self._hub = hub
        self._stalls = Stalls()
        self._complaints: dict[bytes, tuple[bytes | None, float]] = {}
        """Artifact → the parent when it stalled (None: no parent, or the hub), and when the complaint was made."""
        self._opened: deque[bool] = deque(maxlen=REMEMBERED)
        """For each of the last sealed versions, whether ``_parent`` opened it."""
        self._parent: bytes | None = None

    def check(self, path: list[Edge], live: Upstream | None, now: float) -> bool:
        """Stop waiting for the parent to send stalled artifacts, so that other sources are asked. Returns whether
        sealed artifacts of ``path`` are missing.
        """
        rows = []
        if live is not None and live.link.remote != self._parent:
            self._parent = live.link.remote
            self._opened.clear()
        for edge in path:
            entry, holding = self._catalog.get(edge.artifact), self._node.holdings.get(edge.artifact)
            if entry is not None and entry.sealed and (holding is None or holding.incomplete):
                rows.append(StallRow(edge.artifact, _progress(holding), self._patience_s(edge, holding, live)))
        for artifact in self._stalls.find(rows, now, deaf=self._node.paused):
            self._release(artifact, live, now)
        self._forget(now)
        return bool(rows)

    def _patience_s(self, edge: Edge, holding: Holding | None, live: Upstream | None) -> float:
        if holding is not None:
            piece = holding.open.piece
        else:
            piece = limits.ANCHOR_PIECE_BYTES if edge.base is None else limits.PIECE_BYTES
        rtt_s = 0.0 if live is None else live.link.rtt_s or 0.0
        return WITHHELD_S + 2 * piece / SLOWEST_BYTES_S + ROUND_TRIPS * rtt_s

    def _release(self, artifact: bytes, live: Upstream | None, now: float) -> None:
        """Give up on the parent for a stalled artifact, and complain."""
        holding = self._node.holdings.get(artifact)
        waited_for = live is not None and ((holding is not None and holding.source is live) or artifact in live.wanted)
        if live is not None and waited_for:
            live.give_up_on(artifact)
            self.withheld += 1
            entry = self._catalog.get(artifact)
            version = "" if entry is None else str(entry.version)
            self._timeline.withheld(version, live.link.remote)
            logger.warning(
                "version %s: %s does not send what the hub has sealed; this peer pulls the version from other peers",
                version,
                live.link.name,
            )
        self.complain(artifact, live if waited_for else None, now)

    def on_opened(self, holding: Holding) -> None:
        """Record that a new artifact has arrived."""
        if holding.source is not None and holding.source is self._parent_failover.feeding:
            self._opened.append(True)

    def on_missed(self, artifact: bytes, live: Upstream, now: float) -> None:
        """Record that the parent did not open the artifact in time, so that it is pulled."""
        if artifact not in self._complaints:
            self._opened.append(False)
            if self._opened.count(False) >= MISSES:
                self.complain(artifact, live, now)

    def complain(self, artifact: bytes, live: Upstream | None, now: float) -> None:
        """Report to the hub, once, that an artifact makes no progress. ``live``: the parent that should have sent it,
        or None if no parent should have.
        """
        parent = None if live is None or live.link.remote == self._hub.hub else live.link.remote
        if artifact not in self._complaints and len(self._complaints) < limits.MAX_MISSING:
            self._complaints[artifact] = (parent, now)
            self._hub.changed()

    def _forget(self, now: float) -> None:
        for artifact, (_, since) in list(self._complaints.items()):
            holding = self._node.holdings.get(artifact)
            complete = holding is not None and holding.complete
            if (complete or self._catalog.get(artifact) is None) and now - since > COMPLAINT_S:
                del self._complaints[artifact]

    def rows(self) -> list[messages.Missing]:
        """Return the complaints for a report."""
        self._forget(asyncio.get_running_loop().time())
        return [(artifact, parent) for artifact, (parent, _) in self._complaints.items()]


def _progress(holding: Holding | None) -> int:
    if holding is None:
        return -1
    return holding.artifact.held.count + holding.assembly.batches + holding.assembly.sealed
