"""A parent of this node: what comes from it is verified here, before anybody else sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from p2pcast import limits
from p2pcast.artifact.records import Durable, Open
from p2pcast.bell import Bell
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, P2PCastError, RemoteError, RetryableError
from p2pcast.relay.artifact import Offer
from p2pcast.relay.holding import Holding
from p2pcast.relay.lag import Inflow, Lag
from p2pcast.relay.liveness import ALIVE_ACTIVE_S, ALIVE_IDLE_S, ParentWatch, Verdict
from p2pcast.relay.node import Node
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.version import Version
from p2pcast.wire.connection import Event, Message, Piece
from p2pcast.wire.messages import Type

ATTACH_S = 5.0
"""For the parent's answer to ATTACH."""
EXPECTED_S = 2.0
"""A parent that lives may itself wait for its own; after this it is listened to as an idle one again."""
MAX_PINGS = 256
"""PINGs whose answers may still come: a way of five seconds has a hundred under way."""
MAX_HANDLES = 256
"""Artifacts of one link that are remembered after they have come: stripes may bring something of the last few once more."""
MAX_UNNAMED_LAYOUTS = 4
"""A run has one layout as a rule; stripes may interleave a few."""


class Upstream:
    """Owns the link to one parent. ``live``: it pushes what opens from now on; else it only answers WANTs.

    ``beside``: it is no parent, but a peer that is as cut off as we are. It pushes what it has and we lack, and its way from the hub is not ours.
    """

    def __init__(self, node: Node, *, live: bool, beside: bool = False) -> None:
        self.node = node
        self.live = live
        self.beside = beside
        self.link: Link = None  # type: ignore[assignment]  # set by start(), before anything else can happen
        self.handles: dict[int, Holding | None] = {}
        self.offers: dict[bytes, tuple[str, Version | None, Version, bool]] = {}
        """Artifact -> kind, base, version, complete: what the parent said it has."""
        self.wanted: set[bytes] = set()
        self.withheld: set[bytes] = set()
        """What it did not send in time: never asked of it again on this link."""
        self.attached = asyncio.Event()
        self.ended: asyncio.Future[P2PCastError | None] = asyncio.get_running_loop().create_future()
        self.bytes_received = 0
        self._declined: dict[bytes, asyncio.Future[bool]] = {}
        """Artifacts that the parent was asked not to send → whether it has agreed."""
        self.looped = False
        """The parent hangs below us: so it was between two plans, or it was asked too early."""
        self._attached_at: float | None = None
        """When the parent said what it has."""
        self._spared: set[bytes] = set()
        """What the parent was told not to push."""
        self._expected: dict[bytes, float] = {}
        """Artifacts that the hub has opened and the parent has not → when we heard of it."""
        self._layouts: dict[bytes, bytes] = {}
        """Layout → document, of those that came and that no OPEN has named yet."""
        self.lag = Lag()
        """Of the transfers that run on this link."""
        self._pinged: deque[int] = deque(maxlen=MAX_PINGS)
        """PINGs that were not answered yet."""
        self.on_lag: Callable[[], None] = lambda: None
        """Called when the hub should hear at once how this link lags."""
        self._loop = asyncio.get_running_loop()
        self._watch = ParentWatch.start(self._loop.time())
        self._bell = Bell()
        """Rings when a transfer begins, and at the end."""
        self._active = False
        """``active`` as of the last look."""

    def start(self, link: Link) -> None:
        """The link is up: say what is held, and receive."""
        self.link = link
        if link.closed:
            return
        self._watch = ParentWatch.start(self._loop.time(), link.rtt_s)
        node = self.node
        if node.paused:
            link.pause_reading()
        node.upstreams.add(self)
        want: list[list[object]] = []
        if self.live:
            for holding in node.wants():
                if holding.completed_at is None:
                    holding.source = self
                    self.wanted.add(holding.id)
                want.append([holding.id, holding.artifact.held.ranges()])
            # A parent that catches up opens old ones late, and would push them.
            self._spared = {h.id for h in node.holdings.values() if h.source is not self} | node.pulled
        known = list(node.layouts)[-limits.MAX_LAYOUTS :]
        attach = {"live": self.live, "layouts": known, "want": want, "spare": list(self._spared), "reserve": link.reserve}
        link.send(Type.ATTACH, attach)

    def want(self, artifact: bytes) -> None:
        """Ask for an artifact that opened earlier. Without effect once the link is closed: what has a source is asked of nobody else."""
        if artifact in self.wanted or artifact in self.withheld or artifact in self.node.pulled or self.link.closed:
            return
        holding = self.node.holdings.get(artifact)
        if holding is not None:
            if holding.completed_at is not None or holding.finished or holding.source is not None:
                return
            holding.source = self
            holding.idle = False
        self.wanted.add(artifact)
        self._spared.discard(artifact)
        for other in self.node.upstreams:
            if other is not self:
                other.spare(artifact)
        self._bell.ring()
        have = [] if holding is None else holding.artifact.held.ranges()
        self.link.send(Type.WANT, {"artifact": artifact, "have": have})

    def spare(self, artifact: bytes) -> None:
        """It is here, or comes from elsewhere: have nothing (more) of it pushed until it is asked for."""
        if self.live and artifact not in self._spared and not self.link.closed:
            self._spared.add(artifact)
            self.link.send(Type.SPARE, {"artifact": artifact})

    def forsake(self, artifact: bytes) -> None:
        """This parent does not send that artifact, whatever it says: from now on the artifact may come from another source, and what still comes from here counts as well."""
        self.withheld.add(artifact)
        self.offers.pop(artifact, None)
        self._release(artifact)

    def expect(self, artifact: bytes) -> None:
        """The hub says that it has opened: a parent that lives will have it any moment, and one that is silent need not be waited for as long as
        an idle one."""
        if self.live and artifact not in self.node.holdings:
            self._expected[artifact] = self._loop.time()
            self._bell.ring()
            self.node.look()

    def pushes(self, artifact: bytes) -> bool:
        """Whether what opens on this link is passed on at once to those below."""
        return True

    @property
    def expecting(self) -> bool:
        """The hub has opened something, and the parent has not yet."""
        return bool(self._expected)

    async def decline(self, artifact: bytes) -> bool:
        """Before it is pulled: have the parent not send it. False when it is on its way already, and comes; true also when the link ends."""
        if artifact in self.withheld:
            # This parent's announcement of pieces does not count any more.
            return True
        if self.link.closed or artifact in self.wanted:
            return self.link.closed
        answer = self._declined.setdefault(artifact, asyncio.get_running_loop().create_future())
        self._spared.add(artifact)
        self.link.send(Type.RECALL, {"artifact": artifact, "pieces": [0, limits.MAX_PIECES]})
        either: list[asyncio.Future[Any]] = [answer, self.ended]
        await asyncio.wait(either, timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
        self._declined.pop(artifact, None)
        if not answer.done() or answer.result():
            return True
        self._spared.discard(artifact)
        return False

    @property
    def active(self) -> bool:
        """Whether a transfer runs, or should."""
        return bool(self.wanted or self._expected) or any(
            h is not None and h.source is self and h.completed_at is None and not h.aborted for h in self.handles.values()
        )

    async def run(self) -> P2PCastError | None:
        """Watch over the parent until the link ends; the reason, if there is one."""
        loop = asyncio.get_running_loop()
        pinged = 0.0
        try:
            while not self.ended.done():
                every_s = ALIVE_ACTIVE_S if self._active else ALIVE_IDLE_S / 2
                await self._bell.wait(every_s)
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
                    # Until now the parent had no reason to speak often.
                    self._watch.deaf(now)
                    self.lag.begin(now, self.bytes_received)
                if now - pinged >= (ALIVE_ACTIVE_S if self._active else ALIVE_IDLE_S) * 0.9:
                    pinged = now
                    self._pinged.append(int(now * 1e6))
                    self.link.send(Type.PING, {"t": self._pinged[-1]})
                if self.node.paused:
                    # We are not listening, because the disk is behind: silence proves nothing.
                    self._watch.deaf(now)
                    self.lag.begin(now, self.bytes_received)
                    continue
                if self._active and self.lag.look(now, self.bytes_received, self._behind_bytes(), self._watch.rtt_s or 0.0):
                    self.on_lag()
                held = {
                    h: x.artifact.held.count if x is not None and x.source is self else 1 << 62 for h, x in self.handles.items()
                }
                verdict = self._watch.judge(now, active=self._active, held=held, every_s=every_s)
                if verdict is not Verdict.STAY:
                    self.link.abort(RetryableError(f"left parent {self.link.name}: {verdict.value}"))
            return self.ended.result()
        finally:
            self.link.close()

    @property
    def inflow(self) -> Inflow | None:
        """How it receives just now; None while no transfer runs."""
        return self.lag.inflow if self._active else None

    def _behind_bytes(self) -> int:
        """What the parent has of that which it is sending, and this node lacks."""
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
                self._on_message(link, event)
        except P2PCastError as error:
            link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self.node.forward()
        now = self._loop.time()
        self._watch.heard(now, active=self._active)
        if payload_bytes:
            self._watch.paid(now)

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        pass

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.node.forward()
        self.node.upstreams.discard(self)
        for holding in self.node.holdings.values():
            if holding.source is self:
                holding.source = None
        if not self.ended.done():
            self.ended.set_result(error)
            self._bell.ring()
        self.node.owner.on_upstream_lost(self, error)

    # -- receiving

    def _on_piece(self, piece: Piece) -> None:
        holding = self.handles.get(piece.handle)
        if holding is None:
            if piece.handle not in self.handles:
                raise RemoteError(f"PIECE for handle {piece.handle}, which was never opened")
            return
        if holding.aborted:
            return  # by the hub's word; the parent has not heard of it yet
        size = len(piece.payload)
        self.bytes_received += size
        offer = holding.artifact.offer(piece.index, piece.payload)
        if offer is Offer.NEW:
            self.node.add_piece(holding, piece.index, piece.payload)
        elif offer is Offer.DUPLICATE:
            self.node.bytes_duplicate += size
        elif offer is Offer.CORRUPT:
            self.node.pieces_corrupt += 1
            self.node.garbled[self.link.remote] += 1
            raise IntegrityError(f"piece {piece.index} of {holding.open.version} does not match its hash")
        else:
            raise RemoteError(f"piece {piece.index} of {holding.open.version}: {offer.value}")

    def _on_message(self, link: Link, message: Message) -> None:
        kind, body, node = message.type, message.body, self.node
        if kind is Type.BATCH:
            if (holding := self._holding(message)) is not None:
                node.add_batch(holding, message.signed)
        elif kind is Type.OPEN:
            if message.handle not in self.handles:
                self._open(message)
        elif kind is Type.SEAL:
            if (holding := self._holding(message)) is not None:
                node.seal(holding, message.signed)
                self.wanted.discard(holding.id)
        elif kind is Type.CONFIRM:
            # It names its artifact itself: it may come long after the last frame of the artifact's handle.
            confirmed = node.holdings.get(Durable.from_signed(message.signed, node.run_key).artifact)
            if confirmed is not None and confirmed.assembly.sealed:
                node.confirm(confirmed, message.signed)
        elif kind is Type.ABORT:
            # Its OPEN may still be under way on another stripe.
            holding = self.handles.get(message.handle)
            self.handles[message.handle] = None
            self._retire()
            if holding is not None:
                self.wanted.discard(holding.id)
                if node.is_sealed(holding.id):
                    self.forsake(holding.id)
                elif holding.completed_at is None or not holding.confirmed.is_set():
                    node.abort(holding)
        elif kind is Type.ALIVE:
            self._watch.high = dict(body["high"])
        elif kind is Type.PING:
            link.send(Type.PONG, {"t": body["t"]})
        elif kind is Type.PONG:
            # An answer to no PING would have us wait for this parent as long as it likes.
            if body["t"] in self._pinged:
                self._pinged.remove(body["t"])
                self._watch.ping_answered(max(0.0, self._loop.time() - body["t"] / 1e6))
        elif kind is Type.LAYOUT:
            if body["layout"] not in node.layouts:
                # Nobody has signed it; kept only until an OPEN, which follows, has named it.
                self._layouts[body["layout"]] = body["document"]
                while len(self._layouts) > MAX_UNNAMED_LAYOUTS:
                    del self._layouts[next(iter(self._layouts))]
        elif kind in (Type.ATTACHED, Type.PATH):
            if node.ident in body["path"] and not (self.beside and kind is Type.PATH):
                self.looped = True
                raise RemoteError("attaching here would close a loop")
            if self.live and not self.beside:
                node.set_path(body["path"])
            if kind is Type.ATTACHED:
                self.offers = {
                    a: (k, None if base is None else Version.of(base), Version.of(version), complete)
                    for a, k, base, version, complete in body["artifacts"]
                    if a not in self.withheld
                }
                self.attached.set()
                self._attached_at = self._loop.time()
                if self.beside:
                    self.want_newer()
                node.owner.on_offered(self)
        elif kind is Type.UNSENT:
            if (answer := self._declined.get(body["artifact"])) is not None and not answer.done():
                answer.set_result(bool(body["pieces"]))
        elif kind is Type.GONE:
            self.offers.pop(body["artifact"], None)
            self._release(body["artifact"])

    def _release(self, artifact: bytes) -> None:
        """The parent has not got it. It may still open it, and goes by what we said that we hold; until then it may come from elsewhere."""
        self.wanted.discard(artifact)
        holding = self.node.holdings.get(artifact)
        if holding is not None and holding.source is self:
            holding.source = None
        self.node.look()
        self.node.owner.on_offered(self)

    def want_newer(self) -> None:
        """Versions that were on their way when the hub was lost, or were published while this node was down, and had not begun here."""
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
            holding.source is None
            and holding.completed_at is None
            and not (holding.finished or holding.excerpt)
            and holding.id not in self.node.pulled
            and holding.id not in self.withheld
        ):
            holding.source = self
            holding.idle = False
        elif holding.source is not self and (holding.completed_at is None or holding.confirmed.is_set()):
            # An OPEN shows that the parent has forgotten an earlier SPARE.
            self._spared.discard(holding.id)
            self.spare(holding.id)
        self.handles[message.handle] = holding
        self._retire()
        self._expected.pop(holding.id, None)
        if not self._active:
            self._bell.ring()
        if holding.id not in self.withheld:
            self.offers.setdefault(
                holding.id, (holding.open.kind, holding.open.base, holding.open.version, holding.artifact.complete)
            )
        while len(self.offers) > limits.MAX_CATALOG:
            del self.offers[next(iter(self.offers))]

    def _retire(self) -> None:
        """A link may outlast any number of versions: the oldest handles on which nothing more can come are forgotten."""
        if len(self.handles) > MAX_HANDLES:
            over = [
                handle
                for handle, holding in self.handles.items()
                if holding is None or holding.aborted or holding.finished or holding.completed_at is not None
            ]
            for handle in over[: len(self.handles) - MAX_HANDLES]:
                del self.handles[handle]

    def forgotten(self, artifact: bytes) -> None:
        """It is no longer held here."""
        self._spared.discard(artifact)
