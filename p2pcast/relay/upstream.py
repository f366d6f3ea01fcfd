"""The link to a parent. Everything from a parent is verified here before any other part of the node sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from p2pcast.artifact.signed_records import Durable, Open
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.child_lag import ChildLag, Inflow
from p2pcast.relay.holding import ArtifactReceiver, Holding
from p2pcast.relay.node import Parent
from p2pcast.relay.parent_watch import ParentVerdict, ParentWatch
from p2pcast.relay.tuning import ALIVE_ACTIVE_S, ALIVE_IDLE_S, EXPECTED_S, IDLE_SILENCE_S
from p2pcast.relay.verified_pieces import PieceOffer
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Message, Piece
from p2pcast.wire.dispatch import Handlers, dispatch
from p2pcast.wire.messages import Type

MAX_PINGS = 256
"""Most unanswered PINGs that are remembered: with a round trip of five seconds, a hundred are in flight."""
MAX_HANDLES = 256
"""Most handles remembered per link: slow stripes may still deliver frames of the last few artifacts."""
MAX_UNNAMED_LAYOUTS = 4
"""Most layouts kept until an OPEN names them. A run usually has one layout; stripes may interleave a few."""


class ReceivingNode(ArtifactReceiver, Protocol):
    """The part of the node (p2pcast.relay.node) that the links to its parents use."""

    @property
    def ident(self) -> bytes: ...
    @property
    def upstreams(self) -> Collection[Parent]: ...
    @property
    def is_sealed(self) -> Callable[[bytes], bool]:
        """Whether the hub is known to have sealed an artifact."""

    def add_upstream(self, upstream: Parent) -> None: ...
    def upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None: ...
    def offers_changed(self, upstream: Parent) -> None: ...
    def set_path(self, path: list[bytes]) -> None: ...
    def wants(self) -> list[Holding]: ...
    def update_busy(self) -> None: ...
    def abort(self, holding: Holding) -> None: ...
    def count_duplicate(self, size: int) -> None: ...


class Upstream:
    """Takes over the link to one parent; ``start`` attaches. ``live``: the parent pushes every artifact that opens from
    now on; otherwise it only answers WANT.

    ``beside``: the other node is not a parent, but a peer that has also lost the hub. It pushes the artifacts that this
    node is missing, and its path from the hub is not adopted.
    """

    def __init__(self, node: ReceivingNode, link: Link, *, live: bool, beside: bool = False) -> None:
        self.node = node
        self.link = link
        link.owner = self
        self.live = live
        self.beside = beside
        self.handles: dict[int, Holding | None] = {}
        self.offers: dict[bytes, tuple[str, Version | None, Version, bool]] = {}
        """Artifact -> kind, base, version, complete: as the parent announced."""
        self.wanted: set[bytes] = set()
        self.withheld: set[bytes] = set()
        """Artifacts that the parent did not send in time. They are never requested again on this link."""
        self.attached = asyncio.Event()
        self.ended: asyncio.Future[P2PCastError | None] = asyncio.get_running_loop().create_future()
        self.bytes_received = 0
        self._declined: dict[bytes, asyncio.Future[bool]] = {}
        """Artifacts that the parent was asked not to send -> whether it has agreed."""
        self.looped = False
        """The parent is below this node, because a plan is changing or this node attached too early."""
        self._attached_at: float | None = None
        """When the parent announced its artifacts."""
        self._skipped: set[bytes] = set()
        """Artifacts that the parent was asked not to push."""
        self._expected: dict[bytes, float] = {}
        """Artifacts that the hub has opened and the parent has not -> when the hub said so."""
        self._layouts: dict[bytes, bytes] = {}
        """Layout id -> document, of layouts that no OPEN has named yet."""
        self.lag = ChildLag()
        """Of the transfers on this link."""
        self._pinged: deque[int] = deque(maxlen=MAX_PINGS)
        """Times of PINGs without an answer yet, in microseconds."""
        self._on_lag: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._watch = ParentWatch.start(self._loop.time())
        self._wakeup = Wakeup()
        """Notified when a transfer begins, and at the end of the link."""
        self._active = False
        """``active`` as of the last round of ``run``."""
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> Handlers:
        return {
            Type.BATCH: self._on_batch,
            Type.OPEN: self._on_open,
            Type.SEAL: self._on_seal,
            Type.CONFIRM: self._on_confirm,
            Type.ABORT: self._on_abort,
            messages.Alive: self._on_alive,
            messages.Ping: lambda body: self.link.send(messages.Pong(body.t)),
            messages.Pong: self._on_pong,
            messages.Layout: self._on_layout,
            messages.Attached: self._on_attached,
            messages.Path: self._on_path,
            messages.Cancelled: self._on_cancelled,
            messages.Gone: self._on_gone,
        }

    def start(self, on_lag: Callable[[], None] = lambda: None) -> None:
        """Send ATTACH with the held pieces, and receive. Without effect once the link is closed. ``on_lag``: called
        when the hub should be told at once how far this link lags.
        """
        link, self._on_lag = self.link, on_lag
        if link.closed:
            return
        self._watch = ParentWatch.start(self._loop.time(), link.rtt_s)
        node = self.node
        if node.paused:
            link.pause_reading()
        node.add_upstream(self)
        want: list[messages.Wanted] = []
        if self.live:
            for holding in node.wants():
                if holding.incomplete:
                    holding.receive_from(self)
                    self.wanted.add(holding.id)
                want.append((holding.id, holding.artifact.held.ranges()))
            # A parent that catches up opens old artifacts late, and would push them.
            self._skipped = {h.id for h in node.holdings.values() if h.source is not self} | node.pulled
        known = list(node.layouts)[-limits.MAX_LAYOUTS :]
        link.send(messages.Attach(self.live, known, want, spare=list(self._skipped), reserve=link.reserve))

    def want(self, artifact: bytes) -> None:
        """Request an artifact that opened earlier. Does nothing once the link is closed: otherwise, a closed link would
        stay the artifact's source for ever.
        """
        if artifact in self.wanted or artifact in self.withheld or artifact in self.node.pulled or self.link.closed:
            return
        holding = self.node.holdings.get(artifact)
        if holding is not None:
            if not holding.needs_source:
                return
            holding.receive_from(self)
        self.wanted.add(artifact)
        self._skipped.discard(artifact)
        for other in self.node.upstreams:
            if other is not self:
                other.skip(artifact)
        self._wakeup.notify()
        have = [] if holding is None else holding.artifact.held.ranges()
        self.link.send(messages.Want(artifact, have))

    def skip(self, artifact: bytes) -> None:
        """The artifact is here, or comes from another source: ask the parent not to push it until it is wanted."""
        if self.live and artifact not in self._skipped and not self.link.closed:
            self._skipped.add(artifact)
            self.link.send(messages.Skip(artifact))

    def give_up_on(self, artifact: bytes) -> None:
        """This parent does not send the artifact, whatever it announces. From now on another source may; pieces that
        still come from here count as well.
        """
        self.withheld.add(artifact)
        self.offers.pop(artifact, None)
        self._release(artifact)

    def expect(self, artifact: bytes) -> None:
        """Expect an artifact that the hub has opened: a live parent is about to send it, so silence counts as failure
        sooner than on an idle link.
        """
        if self.live and artifact not in self.node.holdings:
            self._expected[artifact] = self._loop.time()
            self._wakeup.notify()
            self.node.update_busy()

    def pushes(self, artifact: bytes) -> bool:
        """Whether an artifact that opens on this link is passed on at once to children."""
        return True

    @property
    def expecting(self) -> bool:
        """The hub has opened an artifact that the parent has not opened yet."""
        return bool(self._expected)

    async def decline(self, artifact: bytes) -> bool:
        """Ask the parent not to send an artifact that will be pulled. Returns False if it is already being sent; True
        also if the link ends.
        """
        if artifact in self.withheld:
            # This parent's announcement of pieces does not count any more.
            return True
        if self.link.closed or artifact in self.wanted:
            return self.link.closed
        answer = self._declined.setdefault(artifact, asyncio.get_running_loop().create_future())
        self._skipped.add(artifact)
        self.link.send(messages.Cancel(artifact, [0, limits.MAX_PIECES]))
        either: list[asyncio.Future[Any]] = [answer, self.ended]
        await asyncio.wait(either, timeout=IDLE_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        self._declined.pop(artifact, None)
        if not answer.done() or answer.result():
            return True
        self._skipped.discard(artifact)
        return False

    @property
    def active(self) -> bool:
        """Whether a transfer is running or due."""
        return bool(self.wanted or self._expected) or any(
            h is not None and h.source is self for h in reversed(self.handles.values())
        )

    async def run(self) -> P2PCastError | None:
        """Watch the parent until the link ends. Returns the error that ended it, if any."""
        loop = asyncio.get_running_loop()
        pinged = 0.0
        try:
            while not self.ended.done():
                every_s = ALIVE_ACTIVE_S if self._active else ALIVE_IDLE_S / 2
                await self._wakeup.wait(every_s)
                now = loop.time()
                if self.ended.done():
                    break
                self._expected = {a: since for a, since in self._expected.items() if now - since < EXPECTED_S}
                if self._attached_at is not None and now - self._attached_at > EXPECTED_S:
                    for artifact in self.wanted - self.offers.keys():
                        self._release(artifact)
                began, self._active = self.active and not self._active, self.active
                self.link.gather(self._active)
                if began:
                    # Until now the parent sent keepalives rarely.
                    self._watch.ignore_silence(now)
                    self.lag.begin(now, self.bytes_received)
                if now - pinged >= (ALIVE_ACTIVE_S if self._active else ALIVE_IDLE_S) * 0.9:
                    pinged = now
                    self._pinged.append(int(now * 1e6))
                    self.link.send(messages.Ping(self._pinged[-1]))
                if self.node.paused:
                    # This node does not read, because its disk is behind: silence proves nothing.
                    self._watch.ignore_silence(now)
                    self.lag.begin(now, self.bytes_received)
                    continue
                if self._active and self.lag.sample(
                    now, self.bytes_received, self._behind_bytes(), self._watch.rtt_s or 0.0
                ):
                    self._on_lag()
                held = {
                    h: x.artifact.held.count if x is not None and x.source is self else 1 << 62
                    for h, x in self.handles.items()
                }
                verdict = self._watch.judge(now, active=self._active, held=held, every_s=every_s)
                if verdict is not ParentVerdict.STAY:
                    self.link.abort(RetryableError(f"left parent {self.link.name}: {verdict.value}"))
            return self.ended.result()
        finally:
            self.link.close()

    @property
    def inflow(self) -> Inflow | None:
        """The rate at which this node receives; None while no transfer runs."""
        return self.lag.inflow if self._active else None

    def _behind_bytes(self) -> int:
        """Return how many bytes of the artifacts that the parent is sending it has and this node does not."""
        sending = ((self.handles.get(handle), pieces) for handle, pieces in self._watch.high.items())
        return sum(
            max(0, pieces - holding.artifact.held.count) * holding.open.piece
            for holding, pieces in sending
            if holding is not None and holding.source is self
        )

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        try:
            if type(event) is Piece:
                self._on_piece(event)
            elif isinstance(event, Message):
                dispatch(self._handlers, event)
        except P2PCastError as error:
            link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self.node.forward()
        now = self._loop.time()
        self._watch.got_message(now, active=self._active)
        if payload_bytes:
            self._watch.got_payload(now)

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        pass

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.node.forward()
        self.node.upstream_lost(self, error)
        if not self.ended.done():
            self.ended.set_result(error)
            self._wakeup.notify()

    # -- receiving

    def _on_piece(self, piece: Piece) -> None:
        holding = self.handles.get(piece.handle)
        if holding is None:
            if piece.handle not in self.handles:
                raise RemoteError(f"PIECE for handle {piece.handle}, which was never opened")
            return
        if holding.aborted:
            return  # The hub has aborted the artifact, and the parent does not know that yet.
        size = len(piece.payload)
        self.bytes_received += size
        offer = holding.artifact.offer(piece.index, piece.payload)
        if offer is PieceOffer.NEW:
            self.node.add_piece(holding, piece.index, piece.payload)
        elif offer is PieceOffer.DUPLICATE:
            self.node.count_duplicate(size)
        elif offer is PieceOffer.CORRUPT:
            self.node.count_corrupt(self.link.remote)
            raise IntegrityError(f"piece {piece.index} of {holding.open.version} does not match its hash")
        else:
            raise RemoteError(f"piece {piece.index} of {holding.open.version}: {offer.value}")

    def _on_batch(self, message: Message) -> None:
        if (holding := self._holding(message)) is not None:
            self.node.add_batch(holding, message.signed)

    def _on_open(self, message: Message) -> None:
        if message.handle not in self.handles:
            self._open(message)

    def _on_seal(self, message: Message) -> None:
        if (holding := self._holding(message)) is not None:
            self.node.seal(holding, message.signed)
            self.wanted.discard(holding.id)

    def _on_confirm(self, message: Message) -> None:
        # CONFIRM names its artifact: it may come long after the last frame of the artifact's handle.
        confirmed = self.node.holdings.get(Durable.from_signed(message.signed, self.node.run_key).artifact)
        if confirmed is not None and confirmed.assembly.sealed:
            self.node.confirm(confirmed, message.signed)

    def _on_abort(self, message: Message) -> None:
        # The OPEN may still be in flight on another stripe.
        holding = self.handles.get(message.handle)
        self.handles[message.handle] = None
        self._retire()
        if holding is not None:
            self.wanted.discard(holding.id)
            if self.node.is_sealed(holding.id):
                self.give_up_on(holding.id)
            elif (held := self.node.holdings.get(holding.id)) is not None and not held.irrevocable:
                self.node.abort(held)

    def _on_alive(self, body: messages.Alive) -> None:
        self._watch.high = dict(body.high)

    def _on_pong(self, body: messages.Pong) -> None:
        # An answer to no PING could set any round trip, and the watch would wait for this parent as long.
        if body.t in self._pinged:
            self._pinged.remove(body.t)
            self._watch.ping_answered(max(0.0, self._loop.time() - body.t / 1e6))

    def _on_layout(self, body: messages.Layout) -> None:
        if body.layout not in self.node.layouts:
            # A layout is not signed. It is kept only until the OPEN that follows has named it.
            self._layouts[body.layout] = body.document
            while len(self._layouts) > MAX_UNNAMED_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]

    def _on_path(self, body: messages.Path) -> None:
        self._take_path(body.path, checked=not self.beside)

    def _on_attached(self, body: messages.Attached) -> None:
        self._take_path(body.path, checked=True)
        self.offers = {
            offer.artifact: (offer.kind, offer.base, offer.version, offer.complete)
            for offer in body.artifacts
            if offer.artifact not in self.withheld
        }
        self.attached.set()
        self._attached_at = self._loop.time()
        if self.beside:
            self.want_newer()
        self.node.offers_changed(self)

    def _take_path(self, path: Sequence[bytes], *, checked: bool) -> None:
        if checked and self.node.ident in path:
            self.looped = True
            raise RemoteError("attaching here would close a loop")
        if self.live and not self.beside:
            self.node.set_path(list(path))

    def _on_cancelled(self, body: messages.Cancelled) -> None:
        if (answer := self._declined.get(body.artifact)) is not None and not answer.done():
            answer.set_result(bool(body.pieces))

    def _on_gone(self, body: messages.Gone) -> None:
        self.offers.pop(body.artifact, None)
        self._release(body.artifact)

    def _release(self, artifact: bytes) -> None:
        """Note that the parent does not have the artifact. It may still open it, with the held pieces that ATTACH or
        WANT listed; until then, a different source may send it.
        """
        self.wanted.discard(artifact)
        holding = self.node.holdings.get(artifact)
        if holding is not None:
            holding.lose_source(self)
        self.node.update_busy()
        self.node.offers_changed(self)

    def want_newer(self) -> None:
        """Request every offered delta that is newer than all held versions: it was published while this node was down,
        or was in transfer when the hub was lost.
        """
        newest = max((h.open.version for h in self.node.holdings.values()), default=None)
        for artifact, (kind, _, version, _) in sorted(self.offers.items(), key=lambda offer: offer[1][2]):
            if kind == "delta" and newest is not None and version > newest:
                self.want(artifact)

    def _holding(self, message: Message) -> Holding | None:
        if message.handle not in self.handles:
            raise RemoteError(f"{message.type.name} for handle {message.handle}, which was never opened")
        return self.handles[message.handle]

    def _open(self, message: Message) -> None:
        if self._layouts:
            named = Open.from_signed(message.signed, self.node.run_key).layout
            document = self._layouts.pop(named, None)
            if document is not None and named not in self.node.layouts:
                self.node.add_layout(Layout.from_document(document, named))
        holding = self.node.open(message.signed, self)
        if (
            holding.needs_source
            and not holding.excerpt
            and holding.id not in self.node.pulled
            and holding.id not in self.withheld
        ):
            holding.receive_from(self)
        elif holding.source is not self and (holding.incomplete or holding.confirmed):
            # An OPEN shows that the parent has forgotten an earlier SKIP.
            self._skipped.discard(holding.id)
            self.skip(holding.id)
        self.handles[message.handle] = holding
        self._retire()
        self._expected.pop(holding.id, None)
        if not self._active:
            self._wakeup.notify()
        if holding.id not in self.withheld:
            self.offers.setdefault(
                holding.id, (holding.open.kind, holding.open.base, holding.open.version, holding.artifact.complete)
            )
        while len(self.offers) > limits.MAX_CATALOG:
            del self.offers[next(iter(self.offers))]

    def _retire(self) -> None:
        """Forget the oldest handles of complete artifacts: a link may outlast any number of versions."""
        if len(self.handles) > MAX_HANDLES:
            over = [handle for handle, holding in self.handles.items() if holding is None or not holding.incomplete]
            for handle in over[: len(self.handles) - MAX_HANDLES]:
                del self.handles[handle]

    def forgotten(self, artifact: bytes) -> None:
        """This node no longer holds the artifact."""
        self._skipped.discard(artifact)
