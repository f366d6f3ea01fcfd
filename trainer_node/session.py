"""A peer's control connection, at the hub."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from p2pcast.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.messages import Body, Type
from topology.tree import Epoch
from trainer_node.peer import Peer

Place = tuple[bytes, str, int]
"""A node and its address."""


class Guiding(Protocol):
    """See ``trainer_node.guide``."""

    def called(self, session: Session, body: Body) -> None: ...
    def missed(self, session: Session, node: bytes) -> None: ...
    def sought(self, session: Session, body: Body) -> None: ...


class SessionOwner(Protocol):
    @property
    def guide(self) -> Guiding: ...
    def joined(self, session: Session, body: Body) -> None: ...
    def reported(self, session: Session, body: Body) -> None: ...
    def left_out(self, session: Session, keys: tuple[str, ...], *, first: bool) -> None:
        """Values of a report that makes no sense without them being taken out; ``first``: of this session."""

    def asked(self, session: Session, body: Body) -> None:
        """For a squash (SQUASH)."""

    def enrolled(self, session: Session, body: Body) -> None:
        """It asks for its next certificate."""

    def left(self, session: Session, error: P2PCastError | None) -> None: ...


class Session:
    """Owns the link; ``peer`` is set once it has joined. ``token``: ident of the token that it was started with; behind TLS it has not proved to know more of it."""

    def __init__(self, link: Link, owner: SessionOwner, token: bytes = b"") -> None:
        self.link = link
        self.token = token
        self.peer: Peer | None = None
        self.farewell = False
        """It said LEAVE: going is no failure."""
        self._owner = owner
        self._renewing = False
        self._odd = False
        """It was said that its reports have values that make no sense."""
        self._heard_at = asyncio.get_running_loop().time()
        self._sent: tuple[Place | None, list[Place]] | None = None
        self._neighbours: list[Place] = []
        self._known: tuple[int, tuple[Place, ...]] = (-1, ())
        self._ways: dict[bytes, list[Any]] = {}
        """What it was told of whom."""

    def is_news(self, turn: int, places: tuple[Place, ...]) -> bool:
        """Whether it has not been told how to reach these, as of ``turn``; then it is about to be."""
        news, self._known = self._known != (turn, places), (turn, places)
        return news

    def send_ways(self, ways: list[list[Any]]) -> None:
        """[node, whether it can be dialled, addresses] of each whom it may have to reach: only what is new to this peer."""
        told, self._ways = self._ways, {row[0]: row for row in ways}
        if news := [row for row in ways if told.get(row[0]) != row]:
            self.link.send(Type.WAYS, {"peers": news})

    def send_plan(self, epoch: Epoch, parent: Place | None, backups: list[Place]) -> None:
        """Only what is new to this peer. ``parent`` None: the hub."""
        if self._sent == (parent, backups) or self.peer is None:
            return
        self._sent = (parent, backups)
        self.peer.sent_epoch = epoch
        node, host, port = parent or (None, "", 0)
        body: Body = {"epoch": list(epoch), "parent": node, "host": host, "port": port, "backups": [list(b) for b in backups]}
        self.link.send(Type.PLAN, body)

    def send_neighbours(self, neighbours: list[Place]) -> None:
        """Only what is new to this peer. Apart from the plan: they change more often, and nobody has to move for them."""
        if self._neighbours != neighbours:
            self._neighbours = neighbours
            self.link.send(Type.NEIGHBOURS, {"peers": [list(place) for place in neighbours]})

    def renewed(self) -> None:
        """Its ENROL has been answered."""
        self._renewing = False

    def beat(self, now: float, silence_s: float) -> None:
        if now - self._heard_at > silence_s:
            self.link.abort(RetryableError(f"silent for {silence_s:.0f} s"))
        else:
            self.link.send(Type.PING, {"t": int(now * 1e6)})

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        kind = event.type
        if kind is Type.JOIN:
            if self.peer is not None:
                link.close(RemoteError("JOIN came twice"))
            else:
                link.introduced()
                self._owner.joined(self, event.body)
        elif kind is Type.PING:
            link.send(Type.PONG, {"t": event.body["t"]})
        elif kind is Type.PONG:
            pass
        elif self.peer is None:
            link.close(RemoteError(f"{kind.name} before JOIN"))
        elif kind is Type.ENROL:
            if self._renewing:
                raise RemoteError("ENROL while the one before is not answered")
            self._renewing = True
            self._owner.enrolled(self, event.body)
        elif kind is Type.REPORT:
            if event.odd:
                self._owner.left_out(self, event.odd, first=not self._odd)
                self._odd = True
            try:
                self._owner.reported(self, event.body)
            except P2PCastError as error:
                link.close(error)
        elif kind is Type.CALL:
            self._owner.guide.called(self, event.body)
        elif kind is Type.UNREACHED:
            self._owner.guide.missed(self, event.body["node"])
        elif kind is Type.SEEK:
            self._owner.guide.sought(self, event.body)
        elif kind is Type.SQUASH:
            self._owner.asked(self, event.body)
        elif kind is Type.LEAVE:
            self.farewell = True
            link.close()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._owner.left(self, error)
