"""A node that we pull from: it sends the pieces that it is asked for, and tells what it has. What it sends is verified as a parent's is."""

from __future__ import annotations

from typing import Protocol

from p2pcast.errors import RemoteError
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.link import Link
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.messages import Type


class Puller(Protocol):
    """Who decides what is asked of whom."""

    def held(self, source: Source, artifact: bytes, pieces: list[int], *, sealed: bool) -> None:
        """It has these pieces (ranges), and with ``sealed`` the whole directory."""

    def gone(self, source: Source, artifact: bytes) -> None:
        """It has nothing of it."""

    def unsent(self, source: Source, artifact: bytes, pieces: list[int]) -> None:
        """It will not send these."""

    def expects(self, source: Source, artifact: bytes, piece: int) -> bool:
        """Whether it was asked for this piece, and has not sent it."""

    def came(self, source: Source, artifact: bytes, piece: int) -> None:
        """A piece that has matched its hash."""

    def heard(self, source: Source, size: int) -> None:
        """Bytes of pieces, or (0) some of a directory."""

    def owed(self, source: Source) -> bool:
        """Whether it has still to send something."""


class Source(Upstream):
    """Owns the link to one source."""

    def __init__(self, node: Node, puller: Puller) -> None:
        super().__init__(node, live=False)
        self._puller = puller
        self.since_s = self._loop.time()
        self.answered: set[bytes] = set()
        """Artifacts of which it has said what it has."""

    @property
    def active(self) -> bool:
        return self._puller.owed(self)

    def pushes(self, artifact: bytes) -> bool:
        return False

    def ask(self, artifact: bytes, pieces: list[int], *, seal: bool) -> None:
        """Without pieces and seal: tell what you have of it."""
        self.link.send(Type.ASK, {"artifact": artifact, "pieces": pieces, "seal": seal})
        self._bell.ring()

    def speaks_of_another(self, artifact: bytes) -> bool:
        """Whether it has opened the artifact on this link for a holding that the node has let go since: it would not open it again here."""
        known = self.node.holdings.get(artifact)
        return any(holding is not None and holding.id == artifact and holding is not known for holding in self.handles.values())

    def recall(self, artifact: bytes, pieces: list[int]) -> None:
        self.link.send(Type.RECALL, {"artifact": artifact, "pieces": pieces})

    def ease(self, bytes_s: int | None) -> None:
        """Send no faster than this, until told otherwise."""
        self.link.send(Type.EASE, {"bytes_s": bytes_s})

    # -- LinkOwner

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        super().on_link_read(link, payload_bytes)
        if payload_bytes:
            self._puller.heard(self, payload_bytes)

    # -- receiving

    def _on_piece(self, piece: Piece) -> None:
        holding = self.handles.get(piece.handle)
        if holding is not None and not holding.aborted and not self._puller.expects(self, holding.id, piece.index):
            # Somebody else was asked for it, or will be: it would come twice.
            raise RemoteError(f"piece {piece.index} of {holding.open.version} was not asked for")
        super()._on_piece(piece)
        if holding is not None:
            self._puller.came(self, holding.id, piece.index)

    def _on_message(self, link: Link, message: Message) -> None:
        kind, body = message.type, message.body
        if kind in (Type.HAVE, Type.GONE):
            self.answered.add(body["artifact"])
        if kind is Type.HAVE:
            self._puller.held(self, body["artifact"], body["pieces"], sealed=body["sealed"])
        elif kind is Type.UNSENT:
            self._puller.unsent(self, body["artifact"], body["pieces"])
        elif kind is Type.GONE:
            self._puller.gone(self, body["artifact"])
        else:
            super()._on_message(link, message)
            if kind in (Type.BATCH, Type.SEAL):
                self._puller.heard(self, 0)
