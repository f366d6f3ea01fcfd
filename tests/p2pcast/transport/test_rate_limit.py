"""Bounds on a node's requests, links and unread answers. Over the rate limit the node waits, beyond the bounds its link
ends, and other nodes are not affected.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.process import event_loop
from p2pcast.transport import stripe as stripe_module
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.rate_limit import BYTES_PER_UNIT, COST, RateLimit, RateLimits, cost
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Connection, ConnectionRequest, Identity
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.messages import SIGNED, Pong, Type

TOKEN = JoinToken(bytes(16), bytes(20))
HUB, PEER, OTHER = (Identity(bytes([n]) * 16, f"node-{n}", TOKEN) for n in (1, 2, 3))
LIMIT_S = 600.0
PING = messages.Ping(7)


def test_a_rate_limit_is_spent_and_refills():
    ration = RateLimit(0.0)
    assert ration.spend(limits.REQUEST_UNITS_BURST, 0.0) == 0
    assert ration.spend(limits.REQUEST_UNITS_PER_S, 0.0) == pytest.approx(1.0)
    assert ration.spend(0.0, 0.5) == pytest.approx(0.5)
    assert ration.spend(0.0, 1.0) == 0


def test_rate_limits_are_per_node_and_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_RATE_LIMITS", 3)
    rations = RateLimits()
    first = rations.of(b"a", 0.0)
    assert rations.of(b"a", 0.0) is first
    for node in (b"b", b"c", b"d"):
        rations.of(node, 0.0)
    assert rations.of(b"a", 0.0) is not first, "idle longest, forgotten first"


FREE = {Type.CELL, Type.PASSED, Type.FILE, Type.DONE, Type.PIECE, *SIGNED}
"""Messages that carry versions."""


def test_every_request_has_a_cost():
    """From the table of states: so a message that is added has to be weighed."""
    asks = {
        kind
        for (state, side, kind) in TRANSITIONS
        if state is not ConnectionState.CLOSED and (side is Side.DIALER or state is ConnectionState.DATA)
    }
    asks |= {kind for (state, _, kind) in TRANSITIONS if state is ConnectionState.ENGINE}
    shaking = {Type.HELLO, Type.CHALLENGE, Type.PROOF, Type.READY, Type.ERROR}
    assert {kind for kind in asks - shaking - FREE if COST[kind] <= 0} == set()
    assert cost(Type.ATTACH, limits.MIB) - cost(Type.ATTACH, 0) == limits.MIB / BYTES_PER_UNIT


class Owner(QuietOwner):
    """Answers PING, as all owners do. ``heard``: number of messages."""

    def __init__(self):
        self.links, self.heard, self.closed = [], 0, {}
        self.fails = False
        self.bell = asyncio.Event()

    def accept_link(self, link, hello):
        link.owner = self
        self.links.append(link)
        self.bell.set()

    def on_link_event(self, link, stripe, event):
        self.heard += 1
        self.bell.set()
        if self.fails:
            raise KeyError("unforeseen")
        if isinstance(event.body, messages.Ping):
            link.send(Pong(event.body.t))

    def on_link_closed(self, link, error):
        self.closed[link] = error
        self.bell.set()

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await self.bell.wait()
                self.bell.clear()


@asynccontextmanager
async def listening():
    owner = Owner()
    listener = Listener(owner, HUB)
    await listener.start("127.0.0.1", 0)
    try:
        yield owner, listener
    finally:
        await listener.stop()
        await asyncio.sleep(0)


async def up(listener, owner, identity=PEER, **options):
    given = {"purpose": "control", "role": "peer"} | options
    return await dial(owner, *listener.address, identity, **given)


async def test_a_node_over_its_rate_limit_waits_and_others_do_not(monkeypatch):
    monkeypatch.setattr(limits, "REQUEST_UNITS_BURST", 100.0)
    monkeypatch.setattr(limits, "REQUEST_UNITS_PER_S", 1.0)
    async with listening() as (theirs, listener):
        greedy, modest = Owner(), Owner()
        flood, link = await up(listener, greedy), await up(listener, modest, OTHER)
        for _ in range(100):
            flood.send(PING)
        await theirs.until(lambda: "rate limit" in theirs.links[0]._pause_reasons)
        heard = theirs.heard
        for _ in range(5000):
            flood.send(PING)
        for n in range(20):
            link.send(PING)
            await modest.until(lambda n=n: modest.heard > n)
        assert theirs.heard - heard <= 100 + 20, "what had been read already, and the modest one's"
        assert not theirs.closed


async def test_a_node_is_read_again_after_its_wait(monkeypatch):
    monkeypatch.setattr(limits, "REQUEST_UNITS_BURST", 60.0)
    monkeypatch.setattr(limits, "REQUEST_UNITS_PER_S", 200.0)
    async with listening() as (_, listener):
        mine = Owner()
        link = await up(listener, mine)
        for _ in range(150):
            link.send(PING)
        await mine.until(lambda: mine.heard == 150)


async def test_all_links_of_a_node_share_one_rate_limit(monkeypatch):
    monkeypatch.setattr(limits, "REQUEST_UNITS_BURST", 150.0)
    monkeypatch.setattr(limits, "REQUEST_UNITS_PER_S", 1e-3)
    async with listening() as (theirs, listener):
        one, other = await up(listener, Owner()), await up(listener, Owner())
        for _ in range(100):
            one.send(PING)
        await theirs.until(lambda: "rate limit" in theirs.links[0]._pause_reasons)
        other.send(PING)
        await theirs.until(lambda: "rate limit" in theirs.links[1]._pause_reasons)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, event_loop.new_event_loop])
def test_closing_a_link_that_does_not_read_ends(monkeypatch, loop):
    """A node that leaves without reading its queue must not keep socket and queue alive."""

    async def play():
        monkeypatch.setattr(stripe_module, "CLOSE_S", 0.05)
        # Some kernels end such a connection, too, but only half a minute later.
        monkeypatch.setattr(stripe_module, "set_close_timeout", lambda sock: None)
        async with listening() as (theirs, listener):
            mine = Owner()
            link = await up(listener, mine)
            link.pause_reading("deaf")
            await theirs.until(lambda: theirs.links)
            here = theirs.links[0]
            stripe = here.stripes[0]
            # A buffer that does not grow: otherwise the kernel may take the whole queue.
            stripe.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            stripe.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            while stripe.writable:
                stripe.write(stripe.connection.send(PING) * 2000)
            held = asyncio.Event()
            monkeypatch.setattr(stripe.connection, "release", held.set)
            here.close()
            async with asyncio.timeout(60):
                await held.wait()
            link.abort()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, event_loop.new_event_loop])
def test_a_link_that_does_not_read_its_answers_is_aborted(monkeypatch, loop):
    """The answers queued for a node that sends requests and reads nothing are bounded."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asks_and_does_not_read(monkeypatch))


async def asks_and_does_not_read(monkeypatch):
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 64 * limits.KIB)
    monkeypatch.setattr(limits, "REQUEST_UNITS_BURST", 1e9)
    async with listening() as (theirs, listener):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, listener.address)
            request = ConnectionRequest("control", "peer", bytes(16), stripe=0, stripes=1)
            connection = Connection(Side.DIALER, PEER, bytes(32), request)
            while not theirs.links:
                await loop.sock_sendall(sock, connection.take_output())
                connection.feed(await loop.sock_recv(sock, 200))
            pings = connection.send(PING) * 20_000

            async def ask():
                while True:
                    await loop.sock_sendall(sock, pings)

            asking = asyncio.create_task(ask())
            await theirs.until(lambda: theirs.closed)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.exception()
        (error,) = theirs.closed.values()
        assert isinstance(error, RetryableError)
        assert "does not read" in str(error)


async def test_the_oldest_link_of_a_node_gives_way(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LINKS_PER_NODE", 3)
    async with listening() as (theirs, listener):
        other = await up(listener, Owner(), OTHER)
        owners = [Owner() for _ in range(5)]
        links = [await up(listener, owner) for owner in owners]
        await theirs.until(lambda: len(theirs.closed) == 2)
        for owner in owners[:2]:
            await owner.until(lambda owner=owner: owner.closed)
        assert [link.closed for link in links] == [True, True, False, False, False]
        assert not other.closed


async def test_a_link_without_a_first_word_ends():
    async with listening() as (theirs, listener):
        mine = Owner()
        await up(listener, mine)
        await theirs.until(lambda: theirs.links)
        theirs.links[0].expect_first_message("JOIN", 0.01)
        await theirs.until(lambda: theirs.closed)
        (error,) = theirs.closed.values()
        assert isinstance(error, RemoteError)
        assert "no JOIN within" in str(error)


async def test_a_link_that_was_introduced_stays():
    async with listening() as (theirs, listener):
        mine = Owner()
        link = await up(listener, mine)
        await theirs.until(lambda: theirs.links)
        theirs.links[0].expect_first_message("JOIN", 0.01)
        theirs.links[0].introduced()
        assert theirs.links[0]._deadline.cancelled()
        link.send(PING)
        await mine.until(lambda: mine.heard)


async def test_an_owners_unexpected_error_ends_one_link(caplog):
    async with listening() as (theirs, listener):
        mine, others = Owner(), Owner()
        link, other = await up(listener, mine), await up(listener, others, OTHER)
        theirs.fails = True
        link.send(PING)
        await mine.until(lambda: mine.closed)
        assert "internal error" in str(mine.closed[link])
        assert "unforeseen" in caplog.text
        theirs.fails = False
        other.send(PING)
        await others.until(lambda: others.heard)


async def test_orphan_stripes_of_a_node_abort_that_nodes_oldest(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STRIPES", 2)
    async with listening() as (_, listener):
        writers = []
        for identity, count in ((OTHER, 1), (PEER, 5)):
            for n in range(count):
                request = ConnectionRequest("data", "child", bytes([n]) * 16, stripe=1, stripes=2)
                reader, writer = await asyncio.open_connection(*listener.address)
                writers.append(writer)
                connection = Connection(Side.DIALER, identity, bytes(32), request)
                up = []
                async with asyncio.timeout(LIMIT_S):
                    while not up:
                        writer.write(connection.take_output())
                        up = connection.feed(await reader.read(4096))
        nodes = [hello.node for hello in listener._orphans.values()]
        for writer in writers:
            writer.transport.abort()
        assert nodes == [OTHER.node, PEER.node, PEER.node]
