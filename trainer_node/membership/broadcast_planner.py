"""Decides when the plan may change: around the broadcast of a version, and between broadcasts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from p2pcast.ground.version import Version
from p2pcast.relay.child_lag import Inflow
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_session import PeerSession


class BroadcastPlanner:
    """Changes the plan in ``membership``; the caller sends the plan to the peers."""

    def __init__(
        self,
        membership: Membership,
        progress: BroadcastProgress,
        timeline: FleetTimeline,
        sessions: Mapping[str, PeerSession],
    ) -> None:
        self._membership = membership
        self._progress = progress
        self._timeline = timeline
        self._sessions = sessions

    def begin(self, version: Version) -> None:
        """Called before the hub sends the first cells of ``version``."""
        now = time.monotonic()
        self._timeline.began(version, now)
        self._progress.begin(version, self._sessions, now)
        self._membership.begin_version()

    def end(self) -> None:
        """Called when the current version was given up."""
        self._progress.end()

    def slowed(self, ident: str, now: float, inflow: Inflow) -> bool:
        """Handle a peer's rate during a broadcast. Returns whether the plan changed because the peer is behind."""
        return ident in self._progress.awaited and self._membership.note_inflow(ident, now, inflow)

    def update(self, now: float) -> bool:
        """Replan once the broadcast has settled, or repair the plan between broadcasts. Returns whether it changed."""
        detached = self._membership.detached
        staged = {
            ident: None if session.peer is None else session.peer.staged
            for ident, session in self._sessions.items()
            if ident not in detached
        }
        if self._progress.settled(staged, now):
            return self._membership.replan(now)
        return not self._progress.under_way and self._membership.repair(now)
