"""Mutual TLS on real sockets: which certificates are accepted, the cost of strangers, and TLS errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import ssl
import time
import weakref

import pytest

from p2pcast import limits
from p2pcast.daemon import event_loop
from p2pcast.errors import P2PCastError, RefusedError, RetryableError, UntrustedError
from p2pcast.transport import handshake_admission
from p2pcast.transport.dial import dial
from p2pcast.transport.enrolment import enrol
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.certificates import new_key, requested_key
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.tls_contexts import Tls, first_contact
from p2pcast.wire import messages
from p2pcast.wire.connection import Connection, ConnectionRequest, Identity, Message
from p2pcast.wire.connection_state import Side
from p2pcast.wire.join_token import JoinToken

LIMIT_S = 600.0
TURNS = 80
"""Of the event loop: about twice what a dial takes."""
SECRET = b"s" * 20
HUB, PEER = b"h" * 16, b"p" * 16


class Place(QuietOwner):
    """A hub's listener: accepts, and answers first connections. Also the owner of links on the dialers' side."""

    def __init__(self, papers, *, evicted=frozenset(), handshake_s=LIMIT_S, role="hub", node=HUB):
        self.certificate = papers
        self.token = JoinToken(papers.run, SECRET, papers.authority.fingerprint)
        self.tls = papers.tls(node, role)
        self.authority = papers.authority.certificate
        self.identity = Identity(node, role, self.token, evicted=evicted, gate=self)
        self.listener = Listener(self, self.identity, self.tls.server, handshake_s=handshake_s)
        self.links: list[Link] = []
        self.bell = asyncio.Event()

    @property
    def leaf(self):
        return self.tls.credentials.certificate

    def secret(self, ident):
        if ident != self.token.ident:
            raise RefusedError("the token is not one that this hub gave out")
        return SECRET

    def dial(self, tls: Tls | ssl.SSLContext | None, node=PEER, **options):
        context = tls.client if isinstance(tls, Tls) else tls
        given = {"purpose": "data", "role": "child"} | options
        return dial(self, *self.listener.address, Identity(node, "p", self.token), tls=context, **given)

    async def until(self, condition) -> None:
        while not condition():  # noqa: ASYNC110  # an acceptor does not report its counts
            await asyncio.sleep(0.01)

    def accept_link(self, link, hello):
        self.links.append(link)
        self.bell.set()

    def on_link_event(self, link, stripe, event):
        if isinstance(event, Message) and isinstance(event.body, messages.Enrol):
            who = Certified(self.certificate.run, link.remote, "peer")
            key = requested_key(event.body.request)
            link.send(messages.Issued(self.certificate.authority.issue(key, who, time.time(), 900)))


@pytest.fixture
def place(papers):
    def run(play, *, loop=event_loop.new_event_loop, **options) -> None:
        async def body() -> None:
            here, broken = Place(papers, **options), []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
            await here.listener.start("127.0.0.1", 0)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await play(here)
            finally:
                await here.listener.stop()
                await asyncio.sleep(0)
            assert broken == []

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())

    return run


LOOPS = pytest.mark.parametrize("loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])


@LOOPS
def test_links_are_mutual_tls_1_3(place, loop):
    async def play(here: Place) -> None:
        link = await here.dial(here.certificate.tls(PEER), stripes=3, expect=HUB)
        assert link.remote == HUB
        tls = link.stripes[0]._transport.get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"
        assert here.links[0].remote == PEER
        link.close()

    place(play, loop=loop)


@LOOPS
def test_handshakes_may_be_interrupted_in_any_turn_of_the_loop(place, loop):
    """The listener stops, or the dial is cancelled; only the event loop closes the sockets."""

    async def play(here: Place) -> None:
        tls, ends = here.certificate.tls(PEER), set()
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as other:
            for turns, stops in itertools.product(range(TURNS), (True, False)):
                dialling = asyncio.create_task(here.dial(tls, timeout_s=LIMIT_S))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns == TURNS - 1:
                    await asyncio.wait([dialling])
                if stops:
                    await here.listener.stop()
                    await connect_some(other.getsockname())
                dialling.cancel()
                for _ in range(3):
                    await connect_some(other.getsockname())
                await asyncio.wait([dialling])
                ends.add((stops, dialling.cancelled() or dialling.exception() is not None))
                if not dialling.cancelled() and dialling.exception() is None:
                    dialling.result().close()
                if stops:
                    await here.listener.start("127.0.0.1", 0)
        assert ends == {(True, True), (True, False), (False, True), (False, False)}

    place(play, loop=loop)


async def connect_some(where: tuple[str, int]) -> None:
    """New sockets, which take the lowest free numbers."""
    with contextlib.ExitStack() as opened:
        for _ in range(6):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, where)


def test_older_tls_is_not_spoken(place):
    async def play(here: Place) -> None:
        old = here.certificate.tls(PEER).client
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(P2PCastError):
            await here.dial(old)
        assert here.links == []

    place(play)


@LOOPS
def test_a_token_gives_a_certificate_that_opens_links(place, loop):
    async def play(here: Place) -> None:
        bought = await enrol(*here.listener.address, here.token, PEER, "p", "peer", new_key())
        assert bought.who == Certified(here.certificate.run, PEER, "peer")
        assert not (await here.dial(Tls(bought), expect=HUB)).closed

    place(play, loop=loop)


def test_a_dialling_parent_is_identified_by_its_certificate(place):
    """The dialling side is TLS's client; allowed messages afterwards depend on which side feeds the other."""

    async def play(here: Place) -> None:
        link = await here.dial(here.certificate.tls(PEER), stripes=2, role="parent", expect=HUB)
        assert here.links[0].remote == PEER
        link.send(messages.Path([PEER]))
        here.links[0].send(messages.Want(bytes(16), []))
        with pytest.raises(P2PCastError, match="parent dials for data"):
            await here.dial(here.certificate.tls(PEER), role="parent", purpose="engine")
        with pytest.raises(RefusedError, match="another node's"):
            await here.dial(here.certificate.tls(PEER), role="parent", node=b"v" * 16)

    place(play, role="peer")


@pytest.mark.parametrize(
    ("token", "kind", "text"),
    [
        (lambda t: JoinToken(t.run, b"S" * 20, t.authority), RefusedError, "not one that this hub gave out"),
        (lambda t: JoinToken(t.run, t.secret, b"?" * 32), UntrustedError, "another run's hub"),
        (lambda t: JoinToken(b"R" * 16, t.secret, t.authority), RefusedError, "another run"),
    ],
)
def test_wrong_tokens_give_no_certificate(place, token, kind, text):
    async def play(here: Place) -> None:
        with pytest.raises(kind, match=text):
            await enrol(*here.listener.address, token(here.token), PEER, "p", "peer", new_key())

    place(play)


@LOOPS
def test_strangers_get_no_further_than_enrolment(place, loop):
    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="stranger answers"):
            await here.dial(first_contact())
        # A dialer that does not check the reached node gets no link either.
        request = ConnectionRequest("data", "child", bytes(16), stripe=0, stripes=1)
        said = Connection(Side.DIALER, Identity(PEER, "p", here.token), bytes(32), request).take_output()
        reader, writer = await asyncio.open_connection(
            *here.listener.address, ssl=first_contact(), server_hostname="hub"
        )
        writer.write(said)
        assert b"nothing to do here but to ask for one" in await reader.read()
        writer.close()
        assert here.links == []

    place(play, loop=loop)


def test_a_peers_listener_requires_a_certificate(place):
    async def play(here: Place) -> None:
        with pytest.raises(P2PCastError, match="perhaps it does not accept"):
            await enrol(*here.listener.address, here.token, PEER, "p", "peer", new_key())
        assert here.links == []

    place(play, role="peer")


def test_a_certificate_of_another_node_is_refused(place):
    async def play(here: Place) -> None:
        with pytest.raises(RefusedError, match="another node's"):
            await here.dial(here.certificate.tls(PEER), node=b"v" * 16)
        assert here.links == []

    place(play)


def test_an_expired_certificate_opens_nothing(place):
    async def play(here: Place) -> None:
        old = here.certificate.tls(PEER, at=time.time() - 3600, lifetime_s=60)
        with pytest.raises(P2PCastError, match="does not accept this node's certificate"):
            await here.dial(old)
        assert here.links == []

    place(play)


def test_a_listener_whose_certificate_has_expired_is_left(place):
    async def play(here: Place) -> None:
        here.tls.use(here.certificate.credentials(HUB, "hub", at=time.time() - 3600, lifetime_s=60))
        with pytest.raises(UntrustedError, match="expired"):
            await here.dial(here.certificate.tls(PEER))

    place(play)


def test_a_renewed_certificate_is_shown_from_the_next_connection_on(place):
    async def play(here: Place) -> None:
        mine = here.certificate.tls(PEER, at=time.time() - 3600, lifetime_s=60)
        mine.use(here.certificate.credentials(PEER))
        first = await here.dial(mine)
        was = first.stripes[0]._transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        here.tls.use(here.certificate.credentials(HUB, "hub"))
        second = await here.dial(mine)
        assert (
            second.stripes[0]._transport.get_extra_info("ssl_object").getpeercert(binary_form=True) == here.leaf != was
        )
        assert not first.closed

    place(play)


def test_another_authoritys_certificates_do_not_count(place, papers):
    other = type(papers)()

    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="from another run"):
            await here.dial(other.tls(PEER))
        mixed = papers.tls(PEER)
        mixed.use(other.credentials(PEER))
        with pytest.raises(P2PCastError):
            await here.dial(mixed)
        assert here.links == []

    place(play)


def test_a_peer_does_not_pass_for_the_hub(place):
    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="a peer answers"):
            await here.dial(here.certificate.tls(PEER), purpose="control", role="peer")

    place(play, role="peer", node=b"x" * 16)


def test_a_trainers_certificate_is_no_servers(place):
    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="from another run"):
            await here.dial(here.certificate.tls(PEER))

    place(play, role="trainer")


def test_an_evicted_node_is_told_of_its_eviction(place):
    async def play(here: Place) -> None:
        with pytest.raises(RefusedError, match="evicted"):
            await here.dial(here.certificate.tls(PEER))
        assert not (await here.dial(here.certificate.tls(b"q" * 16), node=b"q" * 16)).closed

    place(play, evicted={PEER})


# -- what is not TLS, and too much of it


@LOOPS
@pytest.mark.parametrize("said", [b"", b"\xff" * 100], ids=["nothing", "garbage"])
def test_a_rejected_connection_leaves_nothing_in_memory(place, loop, said):
    """Memory is freed without the cycle collector, which a hub with many objects runs only after hundreds of
    connections.
    """

    async def play(here: Place) -> None:
        made = []
        protocol = here.listener._protocol

        def note():
            stripe = protocol()
            made.append(weakref.ref(stripe))
            return stripe

        here.listener._tls_acceptor._factory = note
        gc.collect()
        gc.disable()
        try:
            for context in (first_contact(), here.certificate.tls(PEER).client):
                _, writer = await asyncio.open_connection(*here.listener.address, ssl=context, server_hostname="hub")
                writer.write(said)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await here.until(lambda: len(made) == 2 and not any(ref() for ref in made))
        finally:
            gc.enable()

    place(play, loop=loop)


@LOOPS
def test_a_connection_without_tls_leaves_nothing(place, loop):
    async def play(here: Place) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*here.listener.address)
            writer.write(b"this is no TLS at all, but long enough to be seen as such" * 3)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.transport.abort()
        assert not len(here.listener._waiting)
        await here.until(lambda: not here.listener._tls_acceptor.pending)
        assert not (await here.dial(here.certificate.tls(PEER))).closed

    place(play, loop=loop)


def test_a_plaintext_dialer_is_rejected(place):
    async def play(here: Place) -> None:
        with pytest.raises(P2PCastError):
            await here.dial(None)
        assert here.links == []

    place(play)


def test_the_error_names_a_plaintext_hub(papers):
    async def play() -> None:
        here = Place(papers)
        plain = Listener(here, here.identity)
        await plain.start("127.0.0.1", 0)
        here.listener = plain
        with pytest.raises(RetryableError, match="does not speak TLS: was it started with --plaintext"):
            await here.dial(papers.tls(PEER))
        await plain.stop()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        runner.run(play())


@LOOPS
def test_at_capacity_the_oldest_silent_connection_is_closed(place, loop, monkeypatch):
    """Of twice as many silent connections as there is room for, some are closed, and an honest peer gets in."""
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 16)

    async def play(here: Place) -> None:
        silent = [await asyncio.open_connection(*here.listener.address) for _ in range(32)]
        assert not (await here.dial(here.certificate.tls(PEER), stripes=4)).closed
        assert here.listener._tls_acceptor.pending <= 16
        cut = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
        await asyncio.wait(cut[:16])
        assert sum(task.done() for task in cut) >= 16
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        for _, writer in silent:
            writer.transport.abort()

    place(play, loop=loop)


@LOOPS
def test_a_slow_tls_handshake_is_ended(place, loop):
    async def play(here: Place) -> None:
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()
        here.listener._handshake_s = here.listener._tls_acceptor._handshake_s = LIMIT_S
        assert not (await here.dial(here.certificate.tls(PEER))).closed

    place(play, loop=loop, handshake_s=1.0)


def greeting() -> bytes:
    """A whole ClientHello."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        first_contact().wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


@LOOPS
def test_an_abandoned_handshake_is_closed(place, loop):
    async def play(here: Place) -> None:
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(greeting())
        assert await reader.readexactly(1) == b"\x16"
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.transport.abort()
        here.listener._handshake_s = here.listener._tls_acceptor._handshake_s = LIMIT_S
        assert not (await here.dial(here.certificate.tls(PEER))).closed

    place(play, loop=loop, handshake_s=1.0)


@LOOPS
@pytest.mark.parametrize("cut", [1, 4, 5, 6, -1])
def test_a_partial_client_hello_starts_no_tls(place, loop, cut):
    """TLS is asked for nothing before the rest is there, however it comes."""

    async def play(here: Place) -> None:
        said, made = greeting(), []
        acceptor = here.listener._tls_acceptor
        factory = acceptor._factory
        acceptor._factory = lambda: (made.append(1), factory())[1]
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(said[:cut])
        # A later client completes its handshake earlier.
        assert not (await here.dial(here.certificate.tls(PEER))).closed
        assert len(made) == 1
        writer.write(said[cut:])
        assert await reader.readexactly(1) == b"\x16"
        writer.transport.abort()
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(said[:cut])
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    place(play, loop=loop)


@LOOPS
def test_unauthenticated_handshakes_are_limited_and_links_are_not(place, loop, monkeypatch):
    """A dialer that abandons handshakes is limited to its ration. Authenticated dialers cost nothing of the ration, and
    are admitted even from the same address.
    """
    monkeypatch.setattr(handshake_admission, "BURST", 8)
    monkeypatch.setattr(handshake_admission, "RATE_S", 5.0)

    async def play(here: Place) -> None:
        mine, started = here.certificate.tls(PEER), asyncio.get_running_loop().time()
        for _ in range(5):
            (await here.dial(mine, stripes=6)).close()
        answered, first = 0, asyncio.Event()

        async def hear(reader: asyncio.StreamReader) -> None:
            nonlocal answered
            with contextlib.suppress(ConnectionResetError):
                said = await reader.read(1)
                answered += bool(said)
                first.set()

        async def begin() -> None:
            reader, writer = await asyncio.open_connection(*here.listener.address)
            writer.write(greeting())
            hearing = asyncio.create_task(hear(reader))
            await first.wait()
            await asyncio.wait([hearing], timeout=0.5)
            hearing.cancel()
            writer.transport.abort()

        await asyncio.gather(*(begin() for _ in range(60)))
        assert 0 < answered <= 8 + 5.0 * (asyncio.get_running_loop().time() - started) + 1
        assert not (await here.dial(mine)).closed

    place(play, loop=loop)


def test_stopping_closes_pending_connections(place):
    async def play(here: Place) -> None:
        readers = [await asyncio.open_connection(*here.listener.address) for _ in range(4)]
        await here.until(lambda: here.listener._tls_acceptor.pending == 4)
        await here.listener.stop()
        for reader, writer in readers:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()

    place(play)


def test_without_descriptors_a_listener_waits_and_continues(place, monkeypatch):
    """As on a machine without free descriptors: no connection is accepted for a moment, then all waiting ones."""

    class Short:
        def __init__(self, sock):
            self.sock, self.left = sock, 2

        def accept(self):
            self.left -= 1
            if self.left >= 0:
                raise OSError(24, "too many open files")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    async def play(here: Place) -> None:
        acceptor = here.listener._tls_acceptor
        (sock,) = acceptor._sockets
        asyncio.get_running_loop().remove_reader(sock)
        short = Short(sock)
        acceptor._sockets[:] = [short]
        acceptor._watch(short)
        assert not (await here.dial(here.certificate.tls(PEER))).closed
        assert short.left < 0

    place(play)
