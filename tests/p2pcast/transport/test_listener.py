"""Listening and dialling on real sockets: admission, the cost of strangers, and stripes without their link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.process import event_loop
from p2pcast.transport.dial import MAX_EARLY, dial
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.transport.stripe import Stripe
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER, Connection, ConnectionRequest, Identity, Message
from p2pcast.wire.connection_state import Side
from p2pcast.wire.messages import Gone, Type, encode_map
from tests.support.until import until

TOKEN = JoinToken(bytes(16), bytes(20))
HUB, PEER = Identity(b"h" * 16, "hub", TOKEN), Identity(b"p" * 16, "peer", TOKEN)
LIMIT_S = 600.0
"""Only to end a test that hangs."""


class Owner:
    """Owns links on either side and keeps what happens to them."""

    def __init__(self, turn_away: P2PCastError | None = None):
        self.turn_away = turn_away
        self.links: list[Link] = []
        self.events: list[tuple[Link, int, Any]] = []
        self.closed: list[tuple[Link, P2PCastError | None]] = []
        self.joined = 0
        self.bell = asyncio.Event()

    def accept_link(self, link, hello):
        self.links.append(link)
        self.bell.set()
        if self.turn_away is not None:
            raise self.turn_away

    def on_link_event(self, link, stripe, event):
        self.events.append((link, stripe.number, event))
        self.bell.set()

    def on_link_read(self, link, payload_bytes): ...

    def on_link_writable(self, link, stripe):
        self.joined += 1
        self.bell.set()

    def on_link_closed(self, link, error):
        self.closed.append((link, error))
        self.bell.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await self.bell.wait()
                self.bell.clear()


class Place:
    """A listener with its owner, and raw connections to it."""

    def __init__(self, owner: Owner, listener: Listener):
        self.owner, self.listener = owner, listener
        self.writers: list[asyncio.StreamWriter] = []

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.address)
        self.writers.append(writer)
        return reader, writer

    async def shaken(self, identity=PEER, **hello):
        """A raw connection whose handshake is done: (connection, reader, writer)."""
        reader, writer = await self.raw()
        request = replace(ConnectionRequest("data", "child", b"k" * 16, stripe=0, stripes=1), **hello)
        connection = Connection(Side.DIALER, identity, b"n" * 32, request)
        established = False
        async with asyncio.timeout(LIMIT_S):
            while not established:
                writer.write(connection.take_output())
                data = await reader.read(4096)
                if not data:
                    raise ConnectionError("closed in the handshake")
                established = bool(connection.feed(data))
        return connection, reader, writer

    async def dial(self, owner: Owner, identity=PEER, **options) -> Link:
        return await dial(owner, *self.listener.address, identity, **({"purpose": "data", "role": "child"} | options))


Play = Callable[[Place], Awaitable[None]]


@pytest.fixture
def place():
    def run(play: Play, *, turn_away=None, handshake_s=LIMIT_S, tls=None, loop=event_loop.new_event_loop) -> None:
        async def body() -> None:
            owner = Owner(turn_away)
            listener = Listener(owner, HUB, tls, handshake_s=handshake_s)
            await listener.start("127.0.0.1", 0)
            here = Place(owner, listener)
            try:
                await play(here)
            finally:
                for writer in here.writers:
                    writer.transport.abort()
                await listener.stop()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())

    return run


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that still comes until the other side closes."""
    async with asyncio.timeout(LIMIT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def said(data: bytes) -> str:
    """The text of the ERROR at the end of what a listener sent."""
    while data:
        size, kind, _, _ = HEADER.unpack_from(data)
        body, data = data[HEADER.size : HEADER.size + size], data[HEADER.size + size :]
        if kind == Type.ERROR:
            return body.decode(errors="replace")
    return ""


@pytest.mark.parametrize("loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("stripes", [1, 2, 8])
def test_a_link_has_all_its_stripes_and_messages_go_both_ways(place, loop, stripes):
    async def play(here: Place) -> None:
        mine = Owner()
        link = await here.dial(mine, stripes=stripes, expect=HUB.node)
        await here.owner.until(lambda: here.owner.links and len(here.owner.links[0].stripes) == stripes)
        (theirs,) = here.owner.links
        assert sorted(link.stripes) == sorted(theirs.stripes) == list(range(stripes))
        assert (link.remote, theirs.remote, theirs.name) == (HUB.node, PEER.node, "peer")
        assert theirs.remote_host == "127.0.0.1"
        link.send(messages.Want(bytes(16), []))
        await here.owner.until(lambda: bool(here.owner.events))
        theirs.send(messages.Gone(bytes(16)))
        await mine.until(lambda: bool(mine.events))
        assert mine.events[0][2] == Message(Type.GONE, Gone(bytes(16)))
        link.close()
        assert [e for _, e in mine.closed] == [None], "at once, and once"
        await here.owner.until(lambda: bool(here.owner.closed))
        link.send(messages.Want(bytes(16), []))  # without effect
        link.close()
        assert len(mine.closed) == 1

    place(play, loop=loop)


def test_the_loss_of_one_stripe_ends_the_link_once(place):
    async def play(here: Place) -> None:
        mine = Owner()
        link = await here.dial(mine, stripes=4)
        link.stripes[2].abort(RetryableError("cut"))
        await mine.until(lambda: bool(mine.closed))
        await here.owner.until(lambda: bool(here.owner.closed))
        assert all(s.closed for s in link.stripes.values())
        assert len(mine.closed) == len(here.owner.closed) == 1
        assert mine.closed[0][1].wire_code == "retry"

    place(play)


@pytest.mark.parametrize(
    ("identity", "options", "kind", "text"),
    [
        (Identity(b"p" * 16, "x", JoinToken(bytes(16), b"S" * 20)), {}, RefusedError, "not one that this hub gave out"),
        (Identity(b"p" * 16, "x", JoinToken(b"R" * 16, bytes(20))), {}, RefusedError, "another run"),
        (PEER, {"expect": b"?" * 16}, RefusedError, "another node"),
        (PEER, {"stripes": 8, "expect": b"?" * 16}, RefusedError, "another node"),
    ],
)
def test_refusals_reach_the_dialer(place, identity, options, kind, text):
    async def play(here: Place) -> None:
        with pytest.raises(kind, match=text):
            await here.dial(Owner(), identity, **options)
        assert here.owner.links == []

    place(play)


def test_a_rejected_link_is_a_dial_error_or_a_closed_link(place):
    async def play(here: Place) -> None:
        mine = Owner()
        try:
            link = await here.dial(mine, stripes=2)
        except P2PCastError:
            return
        await mine.until(lambda: bool(mine.closed))
        assert link.closed

    for _ in range(5):
        place(play, turn_away=RetryableError("not joined yet"))


def test_unreachable(place):
    async def play(here: Place) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            with pytest.raises(RetryableError, match="cannot reach"):
                await dial(Owner(), "127.0.0.1", unused.getsockname()[1], PEER, purpose="data", role="child", stripes=3)

    place(play)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "nul\0byte", "."])
def test_a_name_that_is_none_is_unreachable(place, host):
    """The invalid name may come from another peer, through the hub's plan."""

    async def play(here: Place) -> None:
        with pytest.raises(RetryableError, match="cannot reach"):
            await dial(Owner(), host, 1, PEER, purpose="data", role="child")

    place(play)


def test_dialling_a_silent_listener_times_out(place):
    async def play(here: Place) -> None:
        server = await asyncio.start_server(lambda r, w: here.writers.append(w), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(RetryableError, match="no answer"):
            await dial(Owner(), host, port, PEER, purpose="data", role="child", stripes=2, timeout_s=0.05)
        server.close()

    place(play)


def test_a_listener_must_not_send_pieces_before_the_link_is_up(place):
    """Messages before all stripes are up stay in memory: only a few are allowed, and no payload."""

    async def play(here: Place) -> None:
        async def pour(reader, writer) -> None:
            here.writers.append(writer)
            connection = Connection(Side.LISTENER, HUB, b"m" * 32)
            events = []
            while not events:
                data = await reader.read(4096)
                if not data:
                    return
                events = connection.feed(data)
                writer.write(connection.take_output())
            if events[0].hello.stripe == 0:
                for _ in range(MAX_EARLY + 2):
                    writer.write(connection.send(messages.Ping(1)))
            # Stripe 1 never gets further than this.

        async def answer(reader, writer) -> None:
            nonlocal first
            if first:
                first = False
                await pour(reader, writer)
            else:
                here.writers.append(writer)

        first = True
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(P2PCastError):
            await dial(Owner(), host, port, PEER, purpose="data", role="child", stripes=2, timeout_s=0.3)
        server.close()

    place(play)


def test_the_error_names_a_port_in_use(place):
    async def play(here: Place) -> None:
        with pytest.raises(LocalError, match=r"in use.*--listen"):
            await Listener(Owner(), HUB).start(*here.listener.address)

    place(play)


# -- strangers


async def until_none_waits(listener: Listener) -> None:
    await until(lambda: not listener._waiting)


def test_slow_strangers_are_closed(place):
    """A byte now and then does not keep a connection without a token alive."""

    async def play(here: Place) -> None:
        readers = []
        for n in range(10):
            reader, writer = await here.raw()
            writer.write(b"\xb5\0\0\0\1"[: n % 5])
            readers.append(reader)
        for reader in readers:
            assert "no handshake within 0.05 s" in said(await ended(reader))
        await until_none_waits(here.listener)

    place(play, handshake_s=0.05)


def test_a_flood_closes_its_own_connections_and_an_honest_peer_connects(place, monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 20)

    async def play(here: Place) -> None:
        readers = [(await here.raw())[0] for _ in range(60)]
        mine = Owner()
        link = await here.dial(mine, stripes=4)
        assert len(here.listener._waiting) <= 20
        for reader in readers[:40]:
            await ended(reader)
        assert not link.closed

    place(play)


def test_hostile_bytes_end_the_connection_with_a_reason(place):
    async def play(here: Place) -> None:
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 12,
            HEADER.pack(1 << 31, 1, 0, 0),
            HEADER.pack(0, Type.PIECE, 0, 0),
        ):
            reader, writer = await here.raw()
            writer.write(data)
            assert said(await ended(reader))
        await until_none_waits(here.listener)
        assert here.owner.links == []

    place(play)


# -- stripes and their link


def test_stripes_may_come_before_their_link(place):
    async def play(here: Place) -> None:
        for number in (2, 1):
            await here.shaken(stripe=number, stripes=3)
        assert here.owner.links == []
        await here.shaken(stripe=0, stripes=3)
        await here.owner.until(lambda: bool(here.owner.links) and len(here.owner.links[0].stripes) == 3)
        assert here.listener._orphans == {}

    place(play)


def test_at_capacity_the_oldest_orphan_stripe_is_aborted(place, monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 5)

    async def play(here: Place) -> None:
        readers = [(await here.shaken(stripe=1, stripes=2, link=bytes([n]) * 16))[1] for n in range(12)]
        assert len(here.listener._orphans) <= 5
        for reader in readers[:7]:
            await ended(reader)
        link = await here.dial(Owner(), stripes=4)
        assert not link.closed

    place(play)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"stripe": 0, "stripes": 2}, {"stripe": 1, "stripes": 3}),
        ({"stripe": 0, "stripes": 2}, {"stripe": 0, "stripes": 2}),
        ({"stripe": 0, "stripes": 1}, {"stripe": 1, "stripes": 2}),
        ({"stripe": 0, "stripes": 2}, {"stripe": 2, "stripes": 2}),
    ],
    ids=["another count", "twice", "more than one", "beyond"],
)
def test_a_stripe_that_does_not_fit_is_closed_and_the_link_stays(place, first, second):
    async def play(here: Place) -> None:
        await here.shaken(**first)
        await here.owner.until(lambda: bool(here.owner.links))
        try:
            _, reader, _ = await here.shaken(**second)
        except RemoteError as error:
            assert "the other side says" in str(error)  # noqa: PT017
        else:
            assert said(await ended(reader))
        (link,) = here.owner.links
        assert not link.closed
        assert list(link.stripes) == [0]

    place(play)


def test_a_stripe_without_its_link_may_not_speak(place):
    async def play(here: Place) -> None:
        connection, reader, writer = await here.shaken(stripe=1, stripes=2)
        writer.write(connection.send(messages.Want(bytes(16), [])))
        assert "must come first" in said(await ended(reader))

    place(play)


def test_the_same_link_id_of_another_node_is_another_link(place):
    async def play(here: Place) -> None:
        await here.shaken(stripe=0, stripes=2)
        await here.shaken(Identity(b"q" * 16, "other", TOKEN), stripe=0, stripes=2)
        await here.owner.until(lambda: len(here.owner.links) == 2)
        assert [len(link.stripes) for link in here.owner.links] == [1, 1]

    place(play)


def test_an_exception_of_an_event_handler_does_not_crash_the_listener(place):
    """A frame that the state forbids ends that link alone."""

    async def play(here: Place) -> None:
        _, reader, writer = await here.shaken()
        writer.write(HEADER.pack(len(b := encode_map({})), Type.JOIN, 0, 0) + b)
        assert "JOIN from the dialer is not for a connection that is data" in said(await ended(reader))
        await here.owner.until(lambda: bool(here.owner.closed))
        assert isinstance(here.owner.closed[0][1], RemoteError)
        assert not (await here.dial(Owner())).closed

    place(play)


def test_stripes_have_no_attributes_that_show_secrets():
    stripe = Stripe(Connection(Side.LISTENER, HUB, bytes(32)), Owner.__new__(Owner))
    assert repr(TOKEN.secret) not in repr(vars(stripe))


@pytest.mark.parametrize("last", [True, False], ids=["error", "nonsense"])
def test_messages_read_together_with_an_error_are_processed_without_answers(place, last):
    """Answers to these messages are dropped, and the link ends as without them."""

    async def play(here: Place) -> None:
        def answer(link, stripe, event):
            Owner.on_link_event(here.owner, link, stripe, event)
            assert not stripe.writable
            link.send(messages.Pong(1))

        here.owner.on_link_event = answer
        connection, reader, writer = await here.shaken()
        data = connection.send(messages.Ping(7)) + connection.send(messages.Ping(8))
        connection.fail(RetryableError("going"))
        writer.write(data + (connection.take_output() if last else b"\xff" * 40))
        await here.owner.until(lambda: bool(here.owner.closed))
        assert [event.body.t for _, _, event in here.owner.events] == [7, 8]
        ((_, error),) = here.owner.closed
        assert ("going" if last else "unknown") in str(error)
        back = await ended(reader)
        assert ({HEADER.unpack_from(back)[1]} if back else set()) <= {Type.ERROR}

    place(play)
