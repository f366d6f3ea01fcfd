"""What this peer lacks of what the hub has sealed, when its parent does not bring it: it is pulled elsewhere, and the hub is told (``topology.withholding``).

Promises: a parent that opens a version and sends nothing, or not all, or no seal, or opens nothing at all, holds up no version for longer than ``WITHHELD_S`` and
what two pieces take on the slowest way; a parent that sends slowly is left in peace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from p2pcast import limits
from p2pcast.relay.catchup import Edge
from p2pcast.relay.holding import Holding
from p2pcast.relay.upstream import Upstream
from rollout_node.stalls import Row, Stalls

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

WITHHELD_S = 10.0
"""Time without progress of a sealed artifact before it is pulled elsewhere, in seconds. Peers leave a dead parent within a second, and a lagging parent goes on sending: no honest parent stands still for so long."""
SLOWEST_BYTES_S = 125_000.0
"""1 Mbit/s, the slowest link that a run is meant for: on it a piece takes long without being a pause."""
ROUND_TRIPS = 8
MISSES = 3
"""Number of the last `REMEMBERED` sealed versions that a parent may fail to open before this peer reports the parent to the hub."""
REMEMBERED = 8
SAID_S = 5.0
"""Time for which a complaint stays in every report, in seconds, whatever becomes of the version: the complaint may excuse this peer."""


class Lacking:
    def __init__(self, peer: Peer) -> None:
        self.withheld = 0
        """Versions that a parent held up."""
        self._peer = peer
        self._stalls = Stalls()
        self._rows: dict[bytes, tuple[bytes | None, float]] = {}
        """Artifact → the parent when it stalled (None: none, or the hub), and since when that is said."""
        self._opened: deque[bool] = deque(maxlen=REMEMBERED)
        """Of the last sealed versions, whether ``_parent`` opened them."""
        self._parent: bytes | None = None

    def look(self, path: list[Edge], live: Upstream | None, now: float) -> bool:
        """Take from the parent what it does not bring; somebody else is asked then. True when there is something to look at again soon."""
        peer, rows = self._peer, []
        if live is not None and live.link.remote != self._parent:
            self._parent = live.link.remote
            self._opened.clear()
        for edge in path:
            entry, holding = peer.catalog.get(edge.artifact), peer.node.holdings.get(edge.artifact)
            if entry is not None and entry.sealed and (holding is None or holding.completed_at is None):
                rows.append(Row(edge.artifact, _progress(holding), self._patience_s(edge, holding, live)))
        for artifact in self._stalls.look(rows, now, deaf=peer.node.paused):
            self._stalled(artifact, live, now)
        self._forget(now)
        return bool(rows)

    def _patience_s(self, edge: Edge, holding: Holding | None, live: Upstream | None) -> float:
        if holding is not None:
            piece = holding.open.piece
        else:
            piece = limits.ANCHOR_PIECE_BYTES if edge.base is None else limits.PIECE_BYTES
        rtt_s = 0.0 if live is None else live.link.rtt_s or 0.0
        return WITHHELD_S + 2 * piece / SLOWEST_BYTES_S + ROUND_TRIPS * rtt_s

    def _stalled(self, artifact: bytes, live: Upstream | None, now: float) -> None:
        peer, holding = self._peer, self._peer.node.holdings.get(artifact)
        waited_for = live is not None and ((holding is not None and holding.source is live) or artifact in live.wanted)
        if live is not None and waited_for:
            live.forsake(artifact)
            self.withheld += 1
            entry = peer.catalog.get(artifact)
            version = "" if entry is None else str(entry.version)
            peer.chronicle.withheld(version, live.link.remote)
            logger.warning(
                "version %s: %s does not send what the hub has sealed; this peer pulls the version from other peers",
                version,
                live.link.name,
            )
        self.say(artifact, live if waited_for else None, now)

    def opened(self, holding: Holding) -> None:
        """A new artifact has come in."""
        if holding.source is not None and holding.source is self._peer.attachment.feeding:
            self._opened.append(True)

    def missed(self, artifact: bytes, live: Upstream, now: float) -> None:
        """The parent has not opened it in time: it is pulled."""
        if artifact not in self._rows:
            self._opened.append(False)
            if self._opened.count(False) >= MISSES:
                self.say(artifact, live, now)

    def say(self, artifact: bytes, live: Upstream | None, now: float) -> None:
        """Tell the hub, once, that an artifact does not get on; ``live``: who should have sent it, None where nobody should."""
        parent = None if live is None or live.link.remote == self._peer.control.hub else live.link.remote
        if artifact not in self._rows and len(self._rows) < limits.MAX_LACKING:
            self._rows[artifact] = (parent, now)
            self._peer.control.changed()

    def _forget(self, now: float) -> None:
        for artifact, (_, since) in list(self._rows.items()):
            holding = self._peer.node.holdings.get(artifact)
            over = (holding is not None and holding.completed_at is not None) or self._peer.catalog.get(artifact) is None
            if over and now - since > SAID_S:
                del self._rows[artifact]

    def rows(self) -> list[list[bytes | None]]:
        """For a report."""
        self._forget(asyncio.get_running_loop().time())
        return [[artifact, parent] for artifact, (parent, _) in self._rows.items()]


def _progress(holding: Holding | None) -> int:
    if holding is None:
        return -1
    return holding.artifact.held.count + holding.assembly.batches + holding.assembly.sealed
