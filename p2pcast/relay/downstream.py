"""A node's children: the artifacts that each wants, and sending them on its stripes.

To a live child, which the hub's plan places here, the node pushes every artifact that opens here. To a child that
pulls, it announces its pieces and sends those requested, slowly while a version is in transfer
(p2pcast.relay.pull_throttle).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from p2pcast.artifact.piece_set import indices_of, ranges_of
from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.child import Child
from p2pcast.relay.holding import Holding
from p2pcast.relay.pacing import InboundRate
from p2pcast.relay.pull_throttle import Throughput, pull_bytes_s
from p2pcast.relay.read_ahead import PieceStore, ReadAhead
from p2pcast.relay.send_schedule import FrameKind, Send, SendSchedule
from p2pcast.relay.tuning import (
    ALIVE_ACTIVE_S,
    ALIVE_IDLE_S,
    BURST_BYTES,
    CHILD_SILENCE_S,
    MAX_PULLS,
    NEWS_S,
    RATE_WINDOW_S,
)
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.dispatch import Handlers, dispatch
from p2pcast.wire.messages import Type


class FeedingNode(PieceStore, Protocol):
    """The part of the node (p2pcast.relay.node) that the links to its children use."""

    @property
    def path(self) -> list[bytes]:
        """Ids of the nodes from the hub to this one."""

    @property
    def busy(self) -> bool:
        """Whether a version is passing through this node."""

    def update_busy(self) -> None:
        """Check again whether a version is passing through."""


class Downstream:
    """Owns the links to all children. At most ``max_pulls`` of them may pull."""

    def __init__(self, node: FeedingNode, max_pulls: int = MAX_PULLS) -> None:
        self.node = node
        self._max_pulls = max_pulls
        self.children: dict[Link, Child] = {}
        self._loop = asyncio.get_running_loop()
        self._wakeup = Wakeup()
        """Notified when a transfer begins."""
        self._ahead = ReadAhead(node)
        self._sent = Throughput()
        self._inbound = InboundRate()
        self.fewer = Wakeup()
        """Notified when a child has left."""
        self._handlers: Handlers = {
            messages.Attach: self._attach,
            messages.Skip: self._skip,
            messages.Want: self._on_want,
            messages.Request: self._request,
            messages.Cancel: self._cancel,
            messages.SetRate: self._set_rate,
            messages.Ping: lambda child, body: child.link.send(messages.Pong(body.t)),
        }

    @property
    def count(self) -> int:
        return len(self.children)

    @property
    def bytes_sent(self) -> int:
        """Piece bytes sent to the current children."""
        return sum(child.bytes_sent for child in self.children.values())

    @property
    def fed(self) -> int:
        """The number of live children."""
        return sum(child.live for child in self.children.values())

    def accept(self, link: Link) -> None:
        """Take over the link of a new child, whose ATTACH follows."""
        self.children[link] = Child(link, asyncio.get_running_loop().time())
        link.expect_first_message("ATTACH")

    def close(self) -> None:
        self._ahead.close()
        for link in list(self.children):
            link.close()

    async def run(self) -> None:
        """Send keepalives until cancelled."""
        loop = asyncio.get_running_loop()
        active, measured = False, 0.0
        while True:
            await self._wakeup.wait(ALIVE_ACTIVE_S if active else ALIVE_IDLE_S / 2)
            now = loop.time()
            active = any(child.schedules or child.carried for child in self.children.values())
            self.node.update_busy()
            if active and now - measured >= RATE_WINDOW_S:
                measured = now
                for child in list(self.children.values()):
                    child.link.attempt(self._adapt, child)
                self._sent.sample(
                    now, {id(link): sum(s.acked_bytes for s in link.stripes.values()) for link in self.children}
                )
            for child in list(self.children.values()):
                child.link.attempt(self._service, child, now)

    def _adapt(self, child: Child) -> None:
        more = child.choose_stripes()
        child.pace(self._inbound)
        if more:
            self._pump_all(child)

    def _service(self, child: Child, now: float) -> None:
        self._keep_alive(child, now)
        if now - child.announced_at >= NEWS_S:
            child.announced_at = now
            for schedule in child.schedules:
                if schedule.news or schedule.announced_sealed != schedule.artifact.assembly.complete_directory:
                    self._send_have(child, schedule, ranges_of(sorted(schedule.news)))
        if now - child.last_received_at > CHILD_SILENCE_S:
            child.link.abort(RemoteError(f"child {child.link.name} has been silent for {CHILD_SILENCE_S:.0f} s"))

    def _keep_alive(self, child: Child, now: float) -> None:
        """Send ALIVE on the first stripe, and on stripes whose last packets may be lost."""
        trailing = child.trailing(now) if child.carried else []
        every_s = ALIVE_ACTIVE_S if child.schedules or trailing else ALIVE_IDLE_S
        if not child.attached or now - child.alive_at < every_s * 0.9:
            return
        child.alive_at = now
        alive = messages.Alive([(s.handle, s.artifact.held.count) for s in child.schedules if not s.asked])
        child.link.send(alive)
        for stripe in trailing:
            if stripe.number:
                stripe.write(stripe.connection.send(alive))

    # -- for the node

    @property
    def pushing(self) -> bool:
        """Whether part of a version is being sent to a live child."""
        return any(child.schedules.pushing for child in self.children.values())

    def opened(self, holding: Holding, *, push: bool) -> None:
        for child in list(self.children.values()):
            have = child.wishes.pop(holding.id, None)
            if have is not None or (push and child.live and holding.id not in child.skipped):
                self._start_sending(child, holding, have or [], live=True)
                self._pump_all(child)

    def line_up(self, holding: Holding, index: int) -> bool:
        """Queue a verified piece for every child that needs it. Returns whether any does. Call ``pump`` next."""
        wanted = False
        for child in self.children.values():
            wanted = child.schedules.piece_held(holding.artifact, index) or wanted
        return wanted

    def pump(self) -> bool:
        """Send as much as the sockets take. Returns whether a child has pieces left in its queue."""
        waiting = False
        for child in list(self.children.values()):
            if child.schedules:
                child.link.attempt(self._pump_all, child)
                waiting = waiting or child.schedules.waiting
        return waiting

    def sealed(self, holding: Holding) -> None:
        if not holding.made:
            self._inbound.add(holding.assembly.pieces * holding.open.piece, holding.took_s)
        self.pump()

    def confirmed(self, holding: Holding) -> None:
        """Inform every child at once that the hub has confirmed the version. A child to which the artifact is still
        being sent is informed after its SEAL.
        """
        signed = holding.assembly.durable_signed
        for child in list(self.children.values()):
            schedule = child.schedules.get(holding.id)
            if signed is not None and child.attached and (schedule is None or schedule.asked):
                child.link.send_signed(Type.CONFIRM, signed)

    def aborted(self, holding: Holding) -> None:
        for child in self.children.values():
            schedule = child.schedules.drop(holding.artifact)
            if schedule is not None and schedule.opened:
                child.link.send(messages.Abort(), schedule.handle)
            elif schedule is not None:
                child.link.send(messages.Gone(holding.id))

    def gone(self, holding: Holding) -> None:
        """Inform the children that this node has given the artifact up."""
        for child in self.children.values():
            if child.schedules.drop(holding.artifact) is not None:
                child.link.send(messages.Gone(holding.id))

    def forgotten(self, artifact: bytes) -> None:
        """Forget who skipped an artifact that this node no longer has: if it returns, any child may get it."""
        for child in self.children.values():
            child.skipped.discard(artifact)

    def busy_changed(self) -> None:
        """Adapt the rates: a version has begun or has passed through."""
        self._pace()

    def path_changed(self) -> None:
        for child in self.children.values():
            if child.attached:
                child.link.send(messages.Path(self.node.path))

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        child = self.children.get(link)
        if child is None or not isinstance(event, Message):
            return
        dispatch(self._handlers, event, child)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        child = self.children.get(link)
        if child is not None:
            child.last_received_at = self._loop.time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        child = self.children.get(link)
        if child is not None and child.attached and stripe.number < link.in_use:
            self._pump(child, stripe)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.children.pop(link, None)
        self._pace()
        self.fewer.notify()

    # -- attaching

    def _attach(self, child: Child, body: messages.Attach) -> None:
        if child.attached:
            child.link.close(RemoteError("ATTACH came twice"))
            return
        # Allow one link per child: data in flight on an old link would arrive twice.
        for other in list(self.children.values()):
            if other is not child and other.live and body.live and other.link.remote == child.link.remote:
                other.link.abort()
        pulls = [other for other in self.children.values() if other.attached and not other.live]
        own = sum(other.link.remote == child.link.remote for other in pulls)
        if not body.live and (len(pulls) >= self._max_pulls or own >= limits.MAX_PULLS_PER_NODE):
            child.link.close(
                RetryableError(
                    "enough other nodes pull from this node"
                    if own < limits.MAX_PULLS_PER_NODE
                    else "your node pulls from this node already"
                )
            )
            return
        child.attached = True
        child.link.introduced()
        child.live = body.live
        child.begin_stripes(reserve=bool(body.reserve))
        child.schedules.apart = not child.live and child.link.expected > 1
        child.schedules.layouts = frozenset(body.layouts)
        child.skipped = set(body.spare or ())
        offers = [
            messages.Offered(h.id, h.open.kind, h.open.base, h.open.version, h.artifact.complete)
            for h in self.node.holdings.values()
            if h.offered
        ]
        child.link.send(messages.Attached(self.node.path, offers))
        for artifact, have in body.want:
            self._want(child, artifact, have, live=True)
        self._pump_all(child)

    def _on_want(self, child: Child, body: messages.Want) -> None:
        child.skipped.discard(body.artifact)
        self._want(child, body.artifact, body.have, live=False)
        self._pump_all(child)

    def _want(self, child: Child, artifact: bytes, have: Sequence[int], *, live: bool) -> None:
        holding = self.node.holdings.get(artifact)
        if holding is not None and not holding.excerpt:
            self._start_sending(child, holding, have, live=live)
        elif live:
            child.wishes[artifact] = have
        else:
            child.link.send(messages.Gone(artifact))

    def _skip(self, child: Child, body: messages.Skip | messages.Cancel) -> None:
        child.wishes.pop(body.artifact, None)
        child.skipped.add(body.artifact)
        if len(child.skipped) > limits.MAX_CATALOG:
            child.link.close(RemoteError(f"more than {limits.MAX_CATALOG} artifacts that are not to be pushed"))
        elif (holding := self.node.holdings.get(body.artifact)) is not None:
            child.schedules.drop(holding.artifact)

    # -- for children that pull

    def _request(self, child: Child, body: messages.Request) -> None:
        artifact = body.artifact
        holding = self.node.holdings.get(artifact)
        if holding is None or not holding.offered:
            child.link.send(messages.Gone(artifact))
            return
        first = child.schedules.get(artifact) is None
        try:
            unheld = child.schedules.request(
                holding.artifact, indices_of(body.pieces, limits.MAX_REQUESTED + 1), seal=body.seal
            )
        except P2PCastError as error:
            child.link.close(error)
            return
        schedule = child.schedules.get(artifact)
        if (first or not (body.pieces or body.seal)) and schedule is not None:
            # A REQUEST without pieces and seal asks which pieces are here.
            self._send_have(child, schedule, holding.artifact.held.ranges())
            self._pace()
            self._wakeup.notify()
        if unheld:
            child.link.send(messages.Cancelled(artifact, ranges_of(sorted(set(unheld)))))
        self._pump_all(child)

    @staticmethod
    def _send_have(child: Child, schedule: SendSchedule, pieces: list[int]) -> None:
        """Announce pieces: all held ones, or those that arrived since the last HAVE."""
        schedule.announced_sealed = schedule.artifact.assembly.complete_directory
        have = messages.Have(schedule.artifact.id, pieces[: limits.MAX_RANGES], sealed=schedule.announced_sealed)
        schedule.news.clear()
        child.link.send(have)

    def _cancel(self, child: Child, body: messages.Cancel) -> None:
        """Handle CANCEL: the child asks a different source. For an artifact that is pushed, the answer is all or
        nothing: one that is already being sent is sent to the end.
        """
        cancelled = body.pieces
        if child.schedules.get(body.artifact) is None and child.live:
            self._skip(child, body)
        else:
            cancelled = ranges_of(child.schedules.cancel(body.artifact, body.pieces))
        child.link.send(messages.Cancelled(body.artifact, cancelled))

    def _set_rate(self, child: Child, body: messages.SetRate) -> None:
        child.max_bytes_s = body.bytes_s
        self._pace()

    def _pace(self) -> None:
        """Limit the rate of children that pull while a version is in transfer, here or at the child."""
        pulls = [child for child in self.children.values() if child.attached and not child.live]
        shared = pull_bytes_s(self._sent.peak_bytes_s, len(pulls)) if self.node.busy else None
        for child in pulls:
            least = min((x for x in (shared, child.max_bytes_s) if x is not None), default=None)
            for number, stripe in child.link.stripes.items():
                if number or not child.schedules.apart:
                    stripe.pace(least)

    # -- sending

    def _start_sending(self, child: Child, holding: Holding, have: Sequence[int], *, live: bool) -> None:
        try:
            child.schedules.add(holding.artifact, have, live=live)
            self._wakeup.notify()
        except RetryableError as error:
            child.link.close(error)

    def _pump_all(self, child: Child) -> None:
        """Send to a child, each burst on the stripe with the fewest unsent bytes. So a stripe that is recovering from
        loss, or is paced, does not delay pieces that a different stripe could send.
        """
        if not child.attached:
            return
        while child.schedules.waiting and (stripe := child.emptiest()) is not None and self._burst(child, stripe):
            pass
        # Some frames, such as SEAL, are sent only on the first stripe.
        first = child.link.stripes.get(0)
        if first is not None and first.writable:
            self._pump(child, first)

    def _pump(self, child: Child, stripe: Stripe) -> bool:
        """Fill a stripe. Returns False if nothing is left to send, or the next piece must be read first."""
        while stripe.writable:
            if not self._burst(child, stripe):
                return False
        return True

    def _burst(self, child: Child, stripe: Stripe) -> bool:
        """Do one write. Returns False if nothing follows it yet."""
        parts: list[bytes | memoryview] = []
        more = self._frames_for(child, stripe, parts)
        if parts:
            stripe.write(*parts)
        return more

    def _frames_for(self, child: Child, stripe: Stripe, parts: list[bytes | memoryview]) -> bool:
        """Collect the frames of one write. Returns False if nothing follows them yet."""
        schedules, holdings, connection = child.schedules, self.node.holdings, stripe.connection
        room = BURST_BYTES
        while room > 0:
            sends = schedules.next(stripe.number)
            if not sends:
                return False
            for send in sends:
                if send.kind is not FrameKind.PIECE:
                    parts.append(self._frame(stripe, send))
                    continue
                holding = holdings.get(send.artifact.id)
                payload = self.node.payload(holding, send.index) if holding is not None else None
                if payload is None:
                    schedules.put_back(send)
                    self._ahead.begin(child.link, schedules, partial(self._pump_all, child))
                    return False
                size = len(payload)
                child.carried[stripe] = self._loop.time()
                parts += (connection.piece_header(send.handle, send.index, size), payload)
                child.bytes_sent += size
                room -= size
        return True

    def _frame(self, stripe: Stripe, send: Send) -> bytes:
        if send.kind is FrameKind.LAYOUT:
            layout = send.artifact.assembly.layout
            return stripe.connection.send(messages.Layout(layout.layout_id, layout.document))
        return stripe.connection.send_signed(_TYPE[send.kind], send.signed, send.handle)


_TYPE = {
    FrameKind.OPEN: Type.OPEN,
    FrameKind.BATCH: Type.BATCH,
    FrameKind.SEAL: Type.SEAL,
    FrameKind.CONFIRM: Type.CONFIRM,
}
