"""Handles JOIN, and control connections that close.

Guarantees: a node has one session, its newest, and if an older session closes, the peer does not count as gone. If a
message changes the plan, the plan is sent before the next message is handled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2pcast.ground.addresses import show_address, unscoped
from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.observers import Observers
from p2pcast.wire import messages
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, Sessions
from trainer_node.membership.plan_upkeep import PlanUpkeep
from trainer_node.membership.reachability_prober import note_addresses

logger = logging.getLogger("p2pcast.hub")


@dataclass(frozen=True, slots=True)
class SessionObservers:
    """``joined``: called with each peer that has joined. ``left``: called with each peer whose last session has closed,
    and the reason, which is empty after a LEAVE. ``ended``: called with the peer's id whenever a session closes,
    including a replaced one.
    """

    joined: Observers[[PeerRecord]] = field(default_factory=Observers)
    left: Observers[[PeerRecord, str]] = field(default_factory=Observers)
    ended: Observers[[str]] = field(default_factory=Observers)


class JoinHandler:
    """The only writer of ``sessions``."""

    def __init__(
        self,
        sessions: Sessions,
        membership: Membership,
        upkeep: PlanUpkeep,
        leads: LeadDirectory,
        observers: SessionObservers,
        *,
        admit: Callable[[PeerSession, str], str],
        welcome: Callable[[PeerSession], Sequence[messages.Record]],
    ) -> None:
        """``admit`` returns the name under which a node may join, or raises RefusedError. ``welcome`` returns the first
        messages to a peer.
        """
        self._sessions = sessions
        self._membership = membership
        self._upkeep = upkeep
        self._leads = leads
        self._observers = observers
        self._admit = admit
        self._welcome = welcome
        self._stopped = False

    def on_join(self, session: PeerSession, body: messages.Join) -> None:
        ident = session.link.remote.hex()
        host, port = body.listen
        now = time.monotonic()
        name = self._admit(session, body.name)
        peer = PeerRecord(ident, name, body.region, host or unscoped(session.link.remote_host), port, now)
        peer.staged = body.held
        note_addresses(peer, body, session.link.remote_host)
        self._leads.join(peer, body.engine, now)
        old = self._sessions.pop(ident, None)
        if old is not None:
            old.link.close(RemoteError("the same node joined again"))
            self._observers.ended.notify(ident)
        session.peer = peer
        self._sessions[ident] = session
        self._observers.joined.notify(peer)
        self._membership.join(peer, now)
        self._upkeep.probe(ident)
        for message in self._welcome(session):
            session.link.send(message)
            if isinstance(message, messages.Welcome):
                # Before the catalog: a lead with a catalog but no roster takes this hub for an older release.
                self._leads.send_rosters()
        self._upkeep.send_plans()
        self._leads.send_leads()
        logger.info("%s joined from %s (%d peers)", peer.name, show_address(peer.host, peer.port), len(self._sessions))

    def on_closed(self, session: PeerSession, error: P2PCastError | None) -> None:
        peer = session.peer
        if self._stopped or peer is None or self._sessions.get(peer.ident) is not session:
            return
        now = time.monotonic()
        del self._sessions[peer.ident]
        self._membership.leave(peer.ident, now, failed=not session.farewell)
        self._observers.left.notify(peer, "" if session.farewell else str(error or "its connection ended"))
        self._observers.ended.notify(peer.ident)
        self._leads.leave(peer.ident, now)
        logger.info(
            "%s %s (%d peers)",
            peer.name,
            "left" if session.farewell else f"was lost{f': {error}' if error else ''}",
            len(self._sessions),
        )
        self._upkeep.send_plans()
        self._leads.send_leads()
        self._upkeep.settle()

    def stop(self) -> None:
        """Called when the hub exits and closes all connections: peers are then not informed that others have left."""
        self._stopped = True
