"""The children of a node: who wants what, and the pumping of it onto their stripes.

A child by plan is pushed what opens here; one that pulls is told what is held, and sent what it asks for, slowly while a version is on its way (yielding).
"""

from __future__ import annotations

import asyncio
from functools import partial

from p2pcast import limits
from p2pcast.bell import Bell
from p2pcast.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.relay.child import Child
from p2pcast.relay.feed import Do, Feed, Send
from p2pcast.relay.holding import Holding
from p2pcast.relay.liveness import ALIVE_ACTIVE_S, ALIVE_IDLE_S
from p2pcast.relay.node import Node
from p2pcast.relay.pieces import indices_of, ranges_of
from p2pcast.relay.reading_ahead import ReadAhead
from p2pcast.relay.smoothing import Inflow
from p2pcast.relay.yielding import WINDOW_S, Throughput, trickle_bytes_s
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.messages import Body, Type

BURST_BYTES = 128 * limits.KIB
"""Handed to one stripe in one write: two of the largest pieces of a delta."""
CHILD_SILENCE_S = 15.0
"""A child that has said nothing for so long is gone; the hub has long planned around it."""
HAVE_S = 0.2
"""Between two words to a child that pulls about what has come in here."""
MAX_PULLS = 16
"""Others that may pull from one node at a time; more are sent to look elsewhere."""


class Downstream:
    """Owns the links of the children. At most ``max_pulls`` of them may pull."""

    def __init__(self, node: Node, max_pulls: int = MAX_PULLS) -> None:
        self.node = node
        self._max_pulls = max_pulls
        self.children: dict[Link, Child] = {}
        self._loop = asyncio.get_running_loop()
        self._bell = Bell()
        """Rings when a transfer begins."""
        self._ahead = ReadAhead(node)
        self._sent = Throughput()
        self._inflow = Inflow()
        self.fewer = Bell()
        """Rings when a child has gone."""
        node.downstream = self
        node.on_busy.append(self._pace)

    @property
    def fed(self) -> int:
        """Children that expect every version from here."""
        return sum(child.live for child in self.children.values())

    def accept(self, link: Link) -> None:
        """A child has connected; it will say what it wants."""
        self.children[link] = Child(link, asyncio.get_running_loop().time())

    def close(self) -> None:
        self._ahead.close()
        for link in list(self.children):
            link.close()

    async def run(self) -> None:
        """Keepalives, until cancelled."""
        loop = asyncio.get_running_loop()
        active, measured = False, 0.0
        while True:
            await self._bell.wait(ALIVE_ACTIVE_S if active else ALIVE_IDLE_S / 2)
            now = loop.time()
            active = any(child.feeds or child.carried for child in self.children.values())
            self.node.look()
            if active and now - measured >= WINDOW_S:
                measured = now
                for child in list(self.children.values()):
                    child.hold(self._inflow)
                    if child.suit():
                        self._pump_all(child)
                self._sent.look(now, {id(link): sum(s.acked_bytes for s in link.stripes.values()) for link in self.children})
            for child in list(self.children.values()):
                self._keep_alive(child, now)
                if now - child.told_at >= HAVE_S:
                    child.told_at = now
                    for feed in child.feeds:
                        if feed.news or feed.told_sealed != feed.artifact.assembly.complete_directory:
                            self._tell(child, feed, ranges_of(sorted(feed.news)))
                if now - child.heard_at > CHILD_SILENCE_S:
                    child.link.abort(RemoteError(f"child {child.link.name} has been silent for {CHILD_SILENCE_S:.0f} s"))

    def _keep_alive(self, child: Child, now: float) -> None:
        """On the first stripe, and where something may have been lost and nothing follows."""
        trailing = child.trailing(now) if child.carried else []
        every_s = ALIVE_ACTIVE_S if child.feeds or trailing else ALIVE_IDLE_S
        if not child.attached or now - child.alive_at < every_s * 0.9:
            return
        child.alive_at = now
        body = {"high": [[feed.handle, feed.artifact.held.count] for feed in child.feeds if not feed.asked]}
        child.link.send(Type.ALIVE, body)
        for stripe in trailing:
            if stripe.number:
                stripe.write(stripe.connection.send(Type.ALIVE, body))

    # -- the node's side

    @property
    def pushing(self) -> bool:
        """Whether some of a version is on its way to a child by plan."""
        return any(child.feeds.pushing for child in self.children.values())

    def opened(self, holding: Holding, *, push: bool) -> None:
        for child in list(self.children.values()):
            have = child.wishes.pop(holding.id, None)
            if have is not None or (push and child.live and holding.id not in child.spared):
                self._feed(child, holding, have or [], live=True)
                self._pump_all(child)

    def line_up(self, holding: Holding, index: int) -> bool:
        """A piece may go on: put it in line for every child that lacks it. True when there is one. ``pump`` follows."""
        wanted = False
        for child in self.children.values():
            wanted = child.feeds.piece_held(holding.artifact, index) or wanted
        return wanted

    def pump(self) -> bool:
        """Send what the sockets take. True when a child has pieces left in line."""
        waiting = False
        for child in list(self.children.values()):
            if child.feeds:
                self._pump_all(child)
                waiting = waiting or child.feeds.waiting
        return waiting

    def sealed(self, holding: Holding) -> None:
        if not holding.made and holding.completed_at is not None:
            self._inflow.came(holding.assembly.pieces * holding.open.piece, holding.completed_at - holding.opened_at)
        self.pump()

    def confirmed(self, holding: Holding) -> None:
        """Its version is durable at the hub: told at once to every child, but to those that are still being sent it, where that follows the SEAL."""
        signed = holding.assembly.durable_signed
        for child in list(self.children.values()):
            feed = child.feeds.get(holding.id)
            if signed is not None and child.attached and (feed is None or feed.asked):
                child.link.send_signed(Type.CONFIRM, signed)

    def aborted(self, holding: Holding) -> None:
        for child in self.children.values():
            feed = child.feeds.drop(holding.artifact)
            if feed is not None and feed.opened:
                child.link.send(Type.ABORT, {}, feed.handle)
            elif feed is not None:
                child.link.send(Type.GONE, {"artifact": holding.id})

    def gone(self, holding: Holding) -> None:
        """This node has given it up."""
        for child in self.children.values():
            if child.feeds.drop(holding.artifact) is not None:
                child.link.send(Type.GONE, {"artifact": holding.id})

    def path_changed(self) -> None:
        for child in self.children.values():
            if child.attached:
                child.link.send(Type.PATH, {"path": self.node.path})

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        child = self.children.get(link)
        if child is None or not isinstance(event, Message):
            return
        kind, body = event.type, event.body
        if kind is Type.ATTACH:
            self._attach(child, body)
        elif kind is Type.SPARE:
            self._spare(child, body["artifact"])
        elif kind is Type.WANT:
            child.spared.discard(body["artifact"])
            self._want(child, body["artifact"], body["have"], live=False)
            self._pump_all(child)
        elif kind is Type.ASK:
            self._ask(child, body["artifact"], body["pieces"], seal=body["seal"])
        elif kind is Type.RECALL:
            self._recall(child, body["artifact"], body["pieces"])
        elif kind is Type.EASE:
            child.eased = body["bytes_s"]
            self._pace()
        elif kind is Type.PING:
            link.send(Type.PONG, {"t": body["t"]})

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        child = self.children.get(link)
        if child is not None:
            child.heard_at = self._loop.time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        child = self.children.get(link)
        if child is not None and child.attached and stripe.number < link.in_use:
            self._pump(child, stripe)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.children.pop(link, None)
        self._pace()
        self.fewer.ring()

    # -- beginning

    def _attach(self, child: Child, body: Body) -> None:
        if child.attached:
            child.link.close(RemoteError("ATTACH came twice"))
            return
        # One link a child: what an old one still had in flight would come twice.
        for other in list(self.children.values()):
            if other is not child and other.live and body["live"] and other.link.remote == child.link.remote:
                other.link.abort()
        if not body["live"] and sum(other.attached and not other.live for other in self.children.values()) >= self._max_pulls:
            child.link.close(RetryableError("enough others pull from here"))
            return
        child.attached = True
        child.live = body["live"]
        child.meet(reserve=body.get("reserve", False))
        child.feeds.apart = not child.live and child.link.expected > 1
        child.feeds.layouts = frozenset(body["layouts"])
        child.spared = set(body.get("spare", ()))
        offers = [
            [h.id, h.open.kind, None if h.open.base is None else list(h.open.base), list(h.open.version), h.artifact.complete]
            for h in self.node.holdings.values()
            if not (h.idle or h.excerpt)
        ]
        child.link.send(Type.ATTACHED, {"path": self.node.path, "artifacts": offers})
        for artifact, have in body["want"]:
            self._want(child, artifact, have, live=True)
        self._pump_all(child)

    def _want(self, child: Child, artifact: bytes, have: list[int], *, live: bool) -> None:
        holding = self.node.holdings.get(artifact)
        if holding is not None and not holding.excerpt:
            self._feed(child, holding, have, live=live)
        elif live:
            child.wishes[artifact] = have
        else:
            child.link.send(Type.GONE, {"artifact": artifact})

    def _spare(self, child: Child, artifact: bytes) -> None:
        child.wishes.pop(artifact, None)
        child.spared.add(artifact)
        if len(child.spared) > limits.MAX_CATALOG:
            child.link.close(RemoteError(f"more than {limits.MAX_CATALOG} artifacts to be spared"))
        elif (holding := self.node.holdings.get(artifact)) is not None:
            child.feeds.drop(holding.artifact)

    # -- for those who pull

    def _ask(self, child: Child, artifact: bytes, pieces: list[int], *, seal: bool) -> None:
        holding = self.node.holdings.get(artifact)
        if holding is None or holding.idle or holding.excerpt:
            child.link.send(Type.GONE, {"artifact": artifact})
            return
        first = child.feeds.get(artifact) is None
        try:
            unheld = child.feeds.ask(holding.artifact, indices_of(pieces, limits.MAX_ASKED + 1), seal=seal)
        except P2PCastError as error:
            child.link.close(error)
            return
        feed = child.feeds.get(artifact)
        if (first or not (pieces or seal)) and feed is not None:
            # Who asks for nothing wants to hear what there is: the first time, or once more.
            self._tell(child, feed, holding.artifact.held.ranges())
            self._pace()
            self._bell.ring()
        if unheld:
            child.link.send(Type.UNSENT, {"artifact": artifact, "pieces": ranges_of(sorted(set(unheld)))})
        self._pump_all(child)

    @staticmethod
    def _tell(child: Child, feed: Feed, pieces: list[int]) -> None:
        """What is held, or has come in since it was last told."""
        feed.told_sealed = feed.artifact.assembly.complete_directory
        body = {"artifact": feed.artifact.id, "pieces": pieces[: limits.MAX_RANGES], "sealed": feed.told_sealed}
        feed.news.clear()
        child.link.send(Type.HAVE, body)

    def _recall(self, child: Child, artifact: bytes, pieces: list[int]) -> None:
        """It asks somebody else. Of an artifact that is pushed to it the answer is all or nothing: what is on its way comes."""
        feed = child.feeds.get(artifact)
        if feed is None and child.live:
            self._spare(child, artifact)
            unsent = pieces
        else:
            unsent = ranges_of(child.feeds.recall(artifact, pieces))
        child.link.send(Type.UNSENT, {"artifact": artifact, "pieces": unsent})

    def _pace(self) -> None:
        """Those who pull are sent little while a version is on its way, here or at them."""
        pulls = [child for child in self.children.values() if child.attached and not child.live]
        trickle = trickle_bytes_s(self._sent.peak_bytes_s, len(pulls)) if self.node.busy else None
        for child in pulls:
            least = min((x for x in (trickle, child.eased) if x is not None), default=None)
            for number, stripe in child.link.stripes.items():
                if number or not child.feeds.apart:
                    stripe.pace(least)

    # -- sending

    def _feed(self, child: Child, holding: Holding, have: list[int], *, live: bool) -> None:
        try:
            child.feeds.add(holding.artifact, have, live=live)
            self._bell.ring()
        except RetryableError as error:
            child.link.close(error)

    def _pump_all(self, child: Child) -> None:
        """Each burst goes where the least waits: a stripe that makes up for losses, or is held to less, holds up nothing that another could send."""
        if not child.attached:
            return
        while child.feeds.waiting and (stripe := child.emptiest()) is not None and self._burst(child, stripe):
            pass
        # What is on none but the first: what opens and seals.
        first = child.link.stripes.get(0)
        if first is not None and first.writable:
            self._pump(child, first)

    def _pump(self, child: Child, stripe: Stripe) -> bool:
        """Fill a stripe. False when there is nothing left to send, or it has to be read first."""
        while stripe.writable:
            if not self._burst(child, stripe):
                return False
        return True

    def _burst(self, child: Child, stripe: Stripe) -> bool:
        """One write. False when there is nothing behind it yet."""
        parts: list[bytes | memoryview] = []
        more = self._gather(child, stripe, parts)
        if parts:
            stripe.write(*parts)
        return more

    def _gather(self, child: Child, stripe: Stripe, parts: list[bytes | memoryview]) -> bool:
        """Frames for one write. False when there is nothing behind them yet."""
        feeds, holdings, connection = child.feeds, self.node.holdings, stripe.connection
        room = BURST_BYTES
        while room > 0:
            sends = feeds.next(stripe.number)
            if not sends:
                return False
            for send in sends:
                if send.what is not Do.PIECE:
                    parts.append(self._frame(stripe, send))
                    continue
                holding = holdings.get(send.artifact.id)
                payload = self.node.payload(holding, send.index) if holding is not None else None
                if payload is None:
                    feeds.put_back(send)
                    self._ahead.begin(child.link, feeds, partial(self._pump_all, child))
                    return False
                size = len(payload)
                child.carried[stripe] = self._loop.time()
                parts += (connection.piece_header(send.handle, send.index, size), payload)
                child.bytes_sent += size
                room -= size
        return True

    def _frame(self, stripe: Stripe, send: Send) -> bytes:
        if send.what is Do.LAYOUT:
            layout = send.artifact.assembly.layout
            return stripe.connection.send(Type.LAYOUT, {"layout": layout.layout_id, "document": layout.document})
        return stripe.connection.send_signed(_TYPE[send.what], send.signed, send.handle)


_TYPE = {Do.OPEN: Type.OPEN, Do.BATCH: Type.BATCH, Do.SEAL: Type.SEAL, Do.CONFIRM: Type.CONFIRM}
