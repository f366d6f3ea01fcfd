"""The link to a node that this node pulls from. The source sends pieces it was asked for, and announces which pieces it
has. Its pieces are verified like a parent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2pcast.ground.errors import RemoteError
from p2pcast.relay.upstream import ReceivingNode, Upstream
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.dispatch import Handlers


class Puller(Protocol):
    """Decides which pieces are requested from which source."""

    def held(self, source: PullSource, artifact: bytes, pieces: Sequence[int], *, sealed: bool) -> None:
        """The source has these pieces (ranges); ``sealed``: it has the whole directory as well."""

    def gone(self, source: PullSource, artifact: bytes) -> None:
        """The source has nothing of the artifact."""

    def cancelled(self, source: PullSource, artifact: bytes, pieces: Sequence[int]) -> None:
        """The source will not send these pieces."""

    def expects(self, source: PullSource, artifact: bytes, piece: int) -> bool:
        """Whether the source was asked for this piece and has not sent it."""

    def came(self, source: PullSource, artifact: bytes, piece: int) -> None:
        """A piece has arrived and matched its hash."""

    def received(self, source: PullSource, size: int) -> None:
        """``size`` bytes of pieces came; 0: part of a directory."""

    def owed(self, source: PullSource) -> bool:
        """Whether the source still has to send anything."""


class PullSource(Upstream):
    """Takes over the link to one source of pulled pieces."""

    def __init__(self, node: ReceivingNode, puller: Puller, link: Link) -> None:
        super().__init__(node, link, live=False)
        self._puller = puller
        self.since_s = self._loop.time()
        self.answered: set[bytes] = set()
        """Artifacts for which the source has announced its pieces."""

    @property
    def active(self) -> bool:
        return self._puller.owed(self)

    def pushes(self, artifact: bytes) -> bool:
        return False

    def request(self, artifact: bytes, pieces: list[int], *, seal: bool) -> None:
        """Ask for pieces (ranges) and, with ``seal``, the directory. With neither: ask which pieces the source has."""
        self.link.send(messages.Request(artifact=artifact, pieces=pieces, seal=seal))
        self._wakeup.notify()

    def has_stale_handle(self, artifact: bytes) -> bool:
        """Whether the source opened the artifact on this link for a holding that the node has dropped since. The source
        would not open the artifact again on this link.
        """
        known = self.node.holdings.get(artifact)
        return any(
            holding is not None and holding.id == artifact and holding is not known for holding in self.handles.values()
        )

    def cancel(self, artifact: bytes, pieces: list[int]) -> None:
        self.link.send(messages.Cancel(artifact, pieces))

    def set_rate(self, bytes_s: int | None) -> None:
        """Ask the source to send no faster than this until the next SET_RATE; None means no limit."""
        self.link.send(messages.SetRate(bytes_s))

    def _make_handlers(self) -> Handlers:
        return {**super()._make_handlers(), messages.Have: self._on_have}

    # -- LinkOwner

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        super().on_link_read(link, payload_bytes)
        if payload_bytes:
            self._puller.received(self, payload_bytes)

    # -- receiving

    def _on_piece(self, piece: Piece) -> None:
        holding = self.handles.get(piece.handle)
        if holding is not None and not holding.aborted and not self._puller.expects(self, holding.id, piece.index):
            # Another source was asked for this piece, or will be: the piece would come twice.
            raise RemoteError(f"piece {piece.index} of {holding.open.version} was not asked for")
        super()._on_piece(piece)
        if holding is not None:
            self._puller.came(self, holding.id, piece.index)

    def _on_batch(self, message: Message) -> None:
        super()._on_batch(message)
        self._puller.received(self, 0)

    def _on_seal(self, message: Message) -> None:
        super()._on_seal(message)
        self._puller.received(self, 0)

    def _on_have(self, body: messages.Have) -> None:
        self.answered.add(body.artifact)
        self._puller.held(self, body.artifact, body.pieces, sealed=body.sealed)

    def _on_cancelled(self, body: messages.Cancelled) -> None:
        self._puller.cancelled(self, body.artifact, body.pieces)

    def _on_gone(self, body: messages.Gone) -> None:
        self.answered.add(body.artifact)
        self._puller.gone(self, body.artifact)
