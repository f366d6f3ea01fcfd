"""Versions that the hub has sealed and this peer's parent does not send: they are pulled elsewhere, and reported to the
hub (``topology.withholding``).

Promises:

- A parent that withholds a version delays it for no longer than ``WITHHELD_S`` and the time of two pieces on the
  slowest link. Such a parent opens a version and sends nothing, or not all, or no seal, or opens nothing at all.
- A parent that sends slowly keeps its place.
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
"""Time without progress of a sealed artifact before it is pulled elsewhere, in seconds. Peers leave a dead parent
within a second, and a lagging parent goes on sending: no honest parent stands still for so long.
"""
SLOWEST_BYTES_S = 125_000.0
"""1 Mbit/s, the slowest link that a run is meant for: on it a piece takes long without being a pause."""
ROUND_TRIPS = 8
MISSES = 3
"""Number of the last `REMEMBERED` sealed versions that a parent may fail to open before this peer reports the parent to
the hub.
"""
REMEMBERED = 8
COMPLAINT_S = 5.0
"""Time for which a complaint stays in every report, in seconds, whatever becomes of the version: the complaint may
excuse this peer.
"""


class PausableNode(ArtifactHolder, Protocol):
    @property
    def paused(self) -> bool:
        """The node does not read from parents now."""


class MissingVersions:
    """The hub is not reported to itself."""

    def __init__(
        self,
        catalog: ArtifactCatalog,
        node: PausableNode,
        parent_failover: ParentFailover,
        timeline: Timeline,
        hub: HubSession,
    ) -> None:
        self.withheld = 0
        """Versions that a parent held up."""
        self._catalog = catalog
        self._node = node
        self._parent_failover = parent_failover
        self._timeline = timeline
        self._hub = hub
        self._stalls = Stalls()
        self._complaints: dict[bytes, tuple[bytes | None, float]] = {}
        """Artifact → the parent when it stalled (None: no parent, or the hub), and the time of the complaint."""
        self._opened: deque[bool] = deque(maxlen=REMEMBERED)
        """Of the last sealed versions, whether ``_parent`` opened them."""
        self._parent: bytes | None = None

    def check(self, path: list[Edge], live: Upstream | None, now: float) -> bool:
        """Release from the parent what it does not bring, so that other sources are asked. True when sealed artifacts
        of ``path`` are missing.
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
        """A stalled artifact."""
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
        """A new artifact has come in."""
        if holding.source is not None and holding.source is self._parent_failover.feeding:
            self._opened.append(True)

    def on_missed(self, artifact: bytes, live: Upstream, now: float) -> None:
        """The parent did not open the artifact in time: it is pulled."""
        if artifact not in self._complaints:
            self._opened.append(False)
            if self._opened.count(False) >= MISSES:
                self.complain(artifact, live, now)

    def complain(self, artifact: bytes, live: Upstream | None, now: float) -> None:
        """Tell the hub, once, that an artifact makes no progress. ``live``: the parent that should have sent it; None
        where no parent should.
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
        """For a report."""
        self._forget(asyncio.get_running_loop().time())
        return [(artifact, parent) for artifact, (parent, _) in self._complaints.items()]


def _progress(holding: Holding | None) -> int:
    if holding is None:
        return -1
    return holding.artifact.held.count + holding.assembly.batches + holding.assembly.sealed
