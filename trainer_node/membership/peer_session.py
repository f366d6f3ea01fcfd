"""A peer's control connection at the hub, and the table of all joined peers' sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.dispatch import Handlers, dispatch
from topology.plan_tree import Epoch
from trainer_node.membership.peer_record import PeerRecord

_BEFORE_JOIN = (messages.Type.JOIN, messages.Type.PING, messages.Type.PONG)

Place = tuple[bytes, str, int]
"""A node and its address."""


class RouteHandler(Protocol):
    """Handles requests about other peers; see ``trainer_node.membership.plan_distributor``."""

    def on_dial_request(self, session: PeerSession, body: messages.Call) -> None:
        """Handle CALL: the peer asks to be dialled by another peer."""

    def on_unreachable(self, session: PeerSession, node: bytes) -> None:
        """Handle UNREACHABLE: the peer could not dial ``node``."""

    def on_source_request(self, session: PeerSession, body: messages.FindSources) -> None:
        """Handle FIND_SOURCES: the peer asks which peers hold an artifact."""


class Joins(Protocol):
    """Handles the start and the end of a session; see ``trainer_node.membership.join_handler``."""

    def on_join(self, session: PeerSession, body: messages.Join) -> None: ...
    def on_closed(self, session: PeerSession, error: P2PCastError | None) -> None: ...


class Reports(Protocol):
    """Handles reports; see ``trainer_node.membership.report_handler``."""

    def on_report(self, session: PeerSession, body: messages.Report) -> None:
        """Handle a REPORT. If this raises P2PCastError, the session is closed."""

    def on_invalid_values(self, session: PeerSession, keys: tuple[str, ...], *, first: bool) -> None:
        """The decoder removed these values from a report. ``first``: whether this is the first time in this session."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A squash that is ready or being made. ``bytes``: its expected size. ``wait_s``: expected delay in seconds."""

    base: Version
    version: Version
    bytes: int
    wait_s: float


class Squashes(Protocol):
    """Promises squashes; see ``trainer_node.background.anchors_and_squashes``."""

    def ask(self, base: Version, node: bytes) -> Promise | None:
        """Promise a node a squash from ``base`` to the newest version, or return None."""


class Renewals(Protocol):
    """Renews certificates; see ``trainer_node.admission.admission``."""

    def renew_later(self, session: PeerSession, request: bytes) -> None:
        """Renew the peer's certificate, and finally call ``session.renewed``."""


@dataclass(frozen=True, slots=True)
class SessionHandlers:
    """The parts of the hub that handle a peer's messages."""

    joins: Joins
    reports: Reports
    routes: RouteHandler
    squashes: Squashes
    renewals: Renewals


class PeerSession:
    """Owns the link. ``peer`` is set once the peer has joined. ``token``: id of the token that the peer was started
    with; over TLS, the peer has not proved that it knows the token's secret.
    """

    def __init__(self, link: Link, handlers: SessionHandlers, token: bytes = b"") -> None:
        self.link = link
        self.token = token
        self.peer: PeerRecord | None = None
        self.farewell = False
        """The peer sent LEAVE or was evicted, so the end of its session is not a failure."""
        self._handlers = handlers
        self._renewing = False
        self._reported_invalid = False
        """Whether a report of this session had invalid values."""
        self._last_received_at = asyncio.get_running_loop().time()
        self._sent: tuple[Place | None, list[Place]] | None = None
        self._neighbours: list[Place] = []
        self._known: tuple[int, tuple[Place, ...]] = (-1, ())
        self._ways: dict[bytes, messages.Route] = {}
        """The addresses that were sent to this peer, by node."""
        self._table: Handlers = {
            messages.Join: self._on_join,
            messages.Ping: lambda body: link.send(messages.Pong(body.t)),
            messages.Type.REPORT: self._on_report,
            messages.Enrol: self._on_enrol,
            messages.Call: lambda body: handlers.routes.on_dial_request(self, body),
            messages.Unreachable: lambda body: handlers.routes.on_unreachable(self, body.node),
            messages.FindSources: lambda body: handlers.routes.on_source_request(self, body),
            messages.Squash: self._on_squash,
            messages.Leave: self._on_leave,
        }

    def is_news(self, turn: int, places: tuple[Place, ...]) -> bool:
        """Whether this peer has not yet been sent how to reach ``places`` as of ``turn``. Marks them as sent."""
        news, self._known = self._known != (turn, places), (turn, places)
        return news

    def send_ways(self, ways: list[messages.Route]) -> None:
        """Send the new rows of ``ways``. For each peer that this one may have to reach, a row has its node, whether it
        can be dialled, and its addresses.
        """
        told, self._ways = self._ways, {row[0]: row for row in ways}
        if news := [row for row in ways if told.get(row[0]) != row]:
            self.link.send(messages.Addresses(news))

    def send_plan(self, epoch: Epoch, parent: Place | None, backups: list[Place]) -> None:
        """Send the plan if it is new to this peer. ``parent`` is None for the hub."""
        if self._sent == (parent, backups) or self.peer is None:
            return
        self._sent = (parent, backups)
        self.peer.sent_epoch = epoch
        node, host, port = parent or (None, "", 0)
        self.link.send(messages.Plan(epoch, node, host, port, backups))

    def send_neighbours(self, neighbours: list[Place]) -> None:
        """Send neighbours that are new to this peer. Neighbours are not part of the plan: they change more often, and
        no peer moves because of them.
        """
        if self._neighbours != neighbours:
            self._neighbours = neighbours
            self.link.send(messages.Neighbours(neighbours))

    def renewed(self) -> None:
        """Called when the peer's ENROL has been answered."""
        self._renewing = False

    def beat(self, now: float, silence_s: float) -> None:
        if now - self._last_received_at > silence_s:
            self.link.abort(RetryableError(f"silent for {silence_s:.0f} s"))
        else:
            self.link.send(messages.Ping(int(now * 1e6)))

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        if self.peer is None and event.type not in _BEFORE_JOIN:
            link.close(RemoteError(f"{event.type.name} before JOIN"))
        else:
            dispatch(self._table, event)

    def _on_leave(self, body: messages.Leave) -> None:
        self.farewell = True
        self.link.close()

    def _on_join(self, body: messages.Join) -> None:
        if self.peer is not None:
            self.link.close(RemoteError("JOIN came twice"))
        else:
            self.link.introduced()
            self._handlers.joins.on_join(self, body)

    def _on_enrol(self, body: messages.Enrol) -> None:
        if self._renewing:
            raise RemoteError("ENROL while the one before is not answered")
        self._renewing = True
        self._handlers.renewals.renew_later(self, body.request)

    def _on_squash(self, body: messages.Squash) -> None:
        promise = self._handlers.squashes.ask(body.base, self.link.remote)
        if promise is None:
            answer = messages.Squashing(body.base, None, bytes=0, wait_us=0)
        else:
            wait_us = int(promise.wait_s * 1e6)
            answer = messages.Squashing(body.base, promise.version, bytes=promise.bytes, wait_us=wait_us)
        self.link.send(answer)

    def _on_report(self, message: Message) -> None:
        assert isinstance(message.body, messages.Report)
        if message.invalid_keys:
            self._handlers.reports.on_invalid_values(self, message.invalid_keys, first=not self._reported_invalid)
            self._reported_invalid = True
        try:
            self._handlers.reports.on_report(self, message.body)
        except P2PCastError as error:
            self.link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._handlers.joins.on_closed(self, error)


class Sessions(dict[str, PeerSession]):
    """The sessions of all joined peers, by the peer's node in hex. Only ``JoinHandler`` changes it."""

    def send_all(self, record: messages.Record) -> None:
        for session in self.values():
            session.link.send(record)

    def name_of(self, ident: str) -> str:
        """The peer's name, or ``ident`` if the peer is not joined."""
        session = self.get(ident)
        return ident if session is None or session.peer is None else session.peer.name
