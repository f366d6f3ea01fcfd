"""Handles what peers say of themselves over their control connections: JOIN, REPORT, SQUASH, ENROL, and their end.

Promises: a node has one session, its newest, and the end of an older session does not count as the peer's end. Plans
that change because of a message are sent before the next message is handled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from p2pcast.addresses import show_address, unscoped
from p2pcast.errors import P2PCastError, RemoteError
from p2pcast.relay.child_lag import Inflow
from p2pcast.version import Version
from p2pcast.wire import messages
from trainer_node.admission.admission import Admission
from trainer_node.background.anchors_and_squashes import Promise
from trainer_node.commit.barrier import Left
from trainer_node.commit.commits import Commits
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.engine_reports import engine_rows
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, Sessions
from trainer_node.membership.plan_distributor import PlanDistributor
from trainer_node.membership.reachability_prober import settle_in
from trainer_node.membership.restart_recovery import Recovery

logger = logging.getLogger("p2pcast.hub")


class ReportHandler:
    """A ``SessionHandler``; the only writer of ``sessions``. ``ident``: the hub's node."""

    def __init__(
        self,
        ident: bytes,
        sessions: Sessions,
        membership: Membership,
        plans: PlanDistributor,
        broadcasts: BroadcastPlanner,
        timeline: FleetTimeline,
        leads: LeadDirectory,
        barrier: Commits,
        recall: Recovery,
        trust: Admission,
        *,
        welcome: Callable[[PeerSession], list[messages.Record]],
        promise: Callable[[Version, bytes], Promise | None],
        is_sealed: Callable[[bytes], bool],
        fleet_changed: Callable[[], None],
        mirror_is_wrong: Callable[[Sequence[str]], None],
    ) -> None:
        """``welcome``: the first messages to a peer. ``promise``: of a squash from a version to the newest one, for a
        node. ``is_sealed``: whether an artifact is in the hub's store. ``fleet_changed`` is called when a peer has
        another version, or has left. ``mirror_is_wrong`` takes the names of wrong objects on the mirror.
        """
        self.odd_reports = 0
        """Reports with invalid values, which were ignored."""
        self._ident = ident
        self._sessions = sessions
        self._membership = membership
        self._plans = plans
        self._broadcasts = broadcasts
        self._timeline = timeline
        self._leads = leads
        self._barrier = barrier
        self._recall = recall
        self._trust = trust
        self._welcome = welcome
        self._promise = promise
        self._is_sealed = is_sealed
        self._fleet_changed = fleet_changed
        self._mirror_is_wrong = mirror_is_wrong
        self._stopped = False

    # -- SessionHandler

    def on_join(self, session: PeerSession, body: messages.Join) -> None:
        ident = session.link.remote.hex()
        host, port = body.listen
        now = time.monotonic()
        name = self._trust.admit(session, body.name)
        peer = PeerRecord(ident, name, body.region, host or unscoped(session.link.remote_host), port, now)
        peer.staged = body.held
        settle_in(peer, body, session.link.remote_host)
        self._leads.join(peer, body.engine, now)
        old = self._sessions.pop(ident, None)
        if old is not None:
            old.link.close(RemoteError("the same node joined again"))
            self._plans.sources.left(ident)
            self._barrier.handle(Left(ident))
        session.peer = peer
        self._sessions[ident] = session
        self._recall.joined(ident)
        self._membership.join(peer, now)
        self._plans.prober.probe(ident)
        for message in self._welcome(session):
            session.link.send(message)
            if isinstance(message, messages.Welcome):
                # Before the catalog: a lead that has the catalog and no roster takes this hub for an older release.
                self._leads.send_rosters()
        self._timeline.joined(peer)
        self._plans.send_plans()
        self._leads.send_leads()
        logger.info("%s joined from %s (%d peers)", peer.name, show_address(peer.host, peer.port), len(self._sessions))

    def on_renewal_request(self, session: PeerSession, body: messages.Enrol) -> None:
        self._trust.renew_later(session, body.request)

    def on_invalid_values(self, session: PeerSession, keys: tuple[str, ...], *, first: bool) -> None:
        self.odd_reports += 1
        if first and session.peer is not None:
            logger.warning(
                "%s: its reports have invalid values, which are ignored: %s", session.peer.name, ", ".join(keys)
            )

    def on_report(self, session: PeerSession, body: messages.Report) -> None:
        peer = session.peer
        assert peer is not None
        now = time.monotonic()
        before = peer.staged
        self._recall.learn(peer.ident, peer.name, body.durable or (), body.opened or ())
        self._update(peer, body, now)
        self._note_artifacts(peer, body, now)
        self._note_parent(peer, body)
        self._note_inflow(peer, body, now)
        if peer.staged != before:
            self.settle()

    def on_squash_request(self, session: PeerSession, body: messages.Squash) -> None:
        promise = self._promise(body.base, session.link.remote)
        if promise is None:
            answer = messages.Squashing(body.base, None, bytes=0, wait_us=0)
        else:
            wait_us = int(promise.wait_s * 1e6)
            answer = messages.Squashing(body.base, promise.version, bytes=promise.bytes, wait_us=wait_us)
        session.link.send(answer)

    def on_closed(self, session: PeerSession, error: P2PCastError | None) -> None:
        peer = session.peer
        if self._stopped or peer is None or self._sessions.get(peer.ident) is not session:
            return
        now = time.monotonic()
        del self._sessions[peer.ident]
        self._recall.left(peer.ident)
        self._plans.sources.left(peer.ident)
        self._membership.leave(peer.ident, now, failed=not session.farewell)
        self._timeline.left(peer, "" if session.farewell else str(error or "its connection ended"))
        self._barrier.handle(Left(peer.ident))
        self._leads.leave(peer.ident, now)
        logger.info(
            "%s %s (%d peers)",
            peer.name,
            "left" if session.farewell else f"was lost{f': {error}' if error else ''}",
            len(self._sessions),
        )
        self._fleet_changed()
        self._plans.send_plans()
        self._leads.send_leads()
        self.settle()

    # -- for the hub

    def stop(self) -> None:
        """The hub ends and closes all connections: no peer is told that another one has left."""
        self._stopped = True

    def settle(self) -> None:
        """Every second, and after each change: judge withholding peers, and change the plan where it is due."""
        now = time.monotonic()
        self._plans.judge_withholding(now)
        if self._broadcasts.update(now):
            self._plans.send_plans()

    # -- parts of a report

    def _update(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        """Versions, engines and the last transfer."""
        peer.staged = body.staged
        peer.committed = body.committed
        peer.report = body
        peer.engines = engine_rows(body.engines or ())
        self._fleet_changed()
        self._timeline.reported(peer, now)
        self._barrier.reported(peer)
        if (transfer := body.transfer) is not None:
            size, micros = transfer
            self._membership.note_transfer(peer.ident, now, size, micros / 1e6)
        self._membership.note_report(peer.ident, now)

    def _note_artifacts(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        """Artifacts that the peer holds or lacks, and what it received wrong."""
        held = [artifact for artifact in (body.held or ()) if self._plans.knows(artifact)]
        self._plans.sources.holds(peer.ident, held, body.dropped or ())
        if body.garbled is not None:
            self._plans.note_garbled(peer, body.garbled, now)
        if body.evicted is not None:
            self._trust.learn_evictions(body.evicted)
        if body.lacking is not None:
            sealed = [(artifact, parent) for artifact, parent in body.lacking if self._is_sealed(artifact)]
            rows = [(artifact, None if parent is None else parent.hex()) for artifact, parent in sealed]
            self._membership.note_lacking(peer.ident, rows, now)
        if body.spoilt is not None:
            self._mirror_is_wrong(body.spoilt)

    def _note_parent(self, peer: PeerRecord, body: messages.Report) -> None:
        parent = body.parent
        if parent is None:
            return
        above = "" if parent == self._ident else parent.hex()
        if above:
            self._plans.note_link(peer, above)
        if self._membership.note_parent(peer.ident, above, body.epoch or (0, 0)):
            self._plans.send_plans()

    def _note_inflow(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        """The peer's rate during a broadcast."""
        if (row := body.inflow) is None:
            return
        if self._broadcasts.slowed(peer.ident, now, Inflow(row[0], row[1] / 1e6, row[2])):
            logger.info("%s falls behind: the plan is changed around it", peer.name)
            self._plans.send_plans()
