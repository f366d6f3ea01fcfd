"""Mutual TLS on real sockets: who gets in by which certificate, what strangers cost, and how errors of TLS are told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import time
import weakref

import pytest

from p2pcast import event_loop, limits
from p2pcast.errors import P2PCastError, RefusedError, RetryableError, UntrustedError
from p2pcast.transport import turnstile
from p2pcast.transport.dial import dial
from p2pcast.transport.enrol import enrol
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.certificates import new_key, requested_key
from p2pcast.trust.contexts import Tls, first_contact
from p2pcast.trust.roles import Certified
from p2pcast.wire.connection import Connection, Identity, Message
from p2pcast.wire.messages import Type
from p2pcast.wire.state import Side
from p2pcast.wire.token import Token

LIMIT_S = 30.0
SECRET = b"s" * 20
HUB, PEER = b"h" * 16, b"p" * 16


class Place(QuietOwner):
    """A hub's listener: accepts, and answers first connections. Also the owner of links on the dialers' side."""

    def __init__(self, papers, *, evicted=frozenset(), handshake_s=LIMIT_S, role="hub", node=HUB):
        self.papers = papers
        self.token = Token(papers.run, SECRET, papers.authority.fingerprint)
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
        while not condition():  # noqa: ASYNC110  # nobody tells of what a door counts
            await asyncio.sleep(0.01)

    def accept_link(self, link, hello):
        self.links.append(link)
        self.bell.set()

    def on_link_event(self, link, stripe, event):
        if isinstance(event, Message) and event.type is Type.ENROL:
            who = Certified(self.papers.run, link.remote, "peer")
            key = requested_key(event.body["request"])
            link.send(Type.ISSUED, {"certificate": self.papers.authority.issue(key, who, time.time(), 900)})


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
        link = await here.dial(here.papers.tls(PEER), stripes=3, expect=HUB)
        assert link.remote == HUB
        tls = link.stripes[0]._transport.get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"
        assert here.links[0].remote == PEER
        link.close()

    place(play, loop=loop)


def test_older_tls_is_not_spoken(place):
    async def play(here: Place) -> None:
        old = here.papers.tls(PEER).client
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(P2PCastError):
            await here.dial(old)
        assert here.links == []

    place(play)


@LOOPS
def test_a_token_buys_a_certificate_and_that_opens_links(place, loop):
    async def play(here: Place) -> None:
        bought = await enrol(*here.listener.address, here.token, PEER, "p", "peer", new_key())
        assert bought.who == Certified(here.papers.run, PEER, "peer")
        assert not (await here.dial(Tls(bought), expect=HUB)).closed

    place(play, loop=loop)


def test_a_parent_that_dials_its_child_is_who_its_certificate_says(place):
    """TLS roles go by who connected; what each may say afterwards, by who feeds whom."""

    async def play(here: Place) -> None:
        link = await here.dial(here.papers.tls(PEER), stripes=2, role="parent", expect=HUB)
        assert here.links[0].remote == PEER
        link.send(Type.PATH, {"path": [PEER]})
        here.links[0].send(Type.WANT, {"artifact": bytes(16), "have": []})
        with pytest.raises(P2PCastError, match="parent dials for data"):
            await here.dial(here.papers.tls(PEER), role="parent", purpose="engine")
        with pytest.raises(RefusedError, match="another node's"):
            await here.dial(here.papers.tls(PEER), role="parent", node=b"v" * 16)

    place(play, role="peer")


@pytest.mark.parametrize(
    ("token", "kind", "text"),
    [
        (lambda t: Token(t.run, b"S" * 20, t.authority), RefusedError, "not one that this hub gave out"),
        (lambda t: Token(t.run, t.secret, b"?" * 32), UntrustedError, "another run's hub"),
        (lambda t: Token(b"R" * 16, t.secret, t.authority), RefusedError, "another run"),
    ],
)
def test_wrong_tokens_buy_nothing(place, token, kind, text):
    async def play(here: Place) -> None:
        with pytest.raises(kind, match=text):
            await enrol(*here.listener.address, token(here.token), PEER, "p", "peer", new_key())

    place(play)


@LOOPS
def test_strangers_get_no_further_than_enrolment(place, loop):
    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="stranger answers"):
            await here.dial(first_contact())
        # Nor do those who do not look at whom they have reached.
        hello = {"purpose": "data", "role": "child", "link": bytes(16), "stripe": 0, "stripes": 1}
        said = Connection(Side.DIALER, Identity(PEER, "p", here.token), bytes(32), hello).take_output()
        reader, writer = await asyncio.open_connection(*here.listener.address, ssl=first_contact(), server_hostname="hub")
        writer.write(said)
        assert b"nothing to do here but to ask for one" in await reader.read()
        writer.close()
        assert here.links == []

    place(play, loop=loop)


def test_a_peers_listener_takes_no_strangers_at_all(place):
    async def play(here: Place) -> None:
        with pytest.raises(P2PCastError, match="perhaps it does not accept"):
            await enrol(*here.listener.address, here.token, PEER, "p", "peer", new_key())
        assert here.links == []

    place(play, role="peer")


def test_nobody_shows_another_nodes_papers(place):
    async def play(here: Place) -> None:
        with pytest.raises(RefusedError, match="another node's"):
            await here.dial(here.papers.tls(PEER), node=b"v" * 16)
        assert here.links == []

    place(play)


def test_an_expired_certificate_opens_nothing(place):
    async def play(here: Place) -> None:
        old = here.papers.tls(PEER, at=time.time() - 3600, lifetime_s=60)
        with pytest.raises(P2PCastError, match="does not accept this node's certificate"):
            await here.dial(old)
        assert here.links == []

    place(play)


def test_a_listener_whose_certificate_has_expired_is_left(place):
    async def play(here: Place) -> None:
        here.tls.use(here.papers.credentials(HUB, "hub", at=time.time() - 3600, lifetime_s=60))
        with pytest.raises(UntrustedError, match="expired"):
            await here.dial(here.papers.tls(PEER))

    place(play)


def test_a_renewed_certificate_is_shown_from_the_next_connection_on(place):
    async def play(here: Place) -> None:
        mine = here.papers.tls(PEER, at=time.time() - 3600, lifetime_s=60)
        mine.use(here.papers.credentials(PEER))
        first = await here.dial(mine)
        was = first.stripes[0]._transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        here.tls.use(here.papers.credentials(HUB, "hub"))
        second = await here.dial(mine)
        assert second.stripes[0]._transport.get_extra_info("ssl_object").getpeercert(binary_form=True) == here.leaf != was
        assert not first.closed

    place(play)


def test_another_authoritys_certificates_do_not_count(place, papers):
    other = type(papers)()

    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="not one of this run's"):
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
            await here.dial(here.papers.tls(PEER), purpose="control", role="peer")

    place(play, role="peer", node=b"x" * 16)


def test_a_trainers_certificate_is_no_servers(place):
    async def play(here: Place) -> None:
        with pytest.raises(UntrustedError, match="not one of this run's"):
            await here.dial(here.papers.tls(PEER))

    place(play, role="trainer")


def test_the_evicted_are_told_so(place):
    async def play(here: Place) -> None:
        with pytest.raises(RefusedError, match="evicted"):
            await here.dial(here.papers.tls(PEER))
        assert not (await here.dial(here.papers.tls(b"q" * 16), node=b"q" * 16)).closed

    place(play, evicted={PEER})


# -- what is not TLS, and too much of it


@LOOPS
@pytest.mark.parametrize("said", [b"", b"\xff" * 100], ids=["nothing", "garbage"])
def test_whoever_was_shown_out_leaves_nothing_in_memory(place, loop, said):
    """Not even until Python looks for cycles: at a hub with its many objects that is after hundreds of connections."""

    async def play(here: Place) -> None:
        made = []
        protocol = here.listener._protocol

        def note():
            stripe = protocol()
            made.append(weakref.ref(stripe))
            return stripe

        here.listener._door._factory = note
        gc.collect()
        gc.disable()
        try:
            for context in (first_contact(), here.papers.tls(PEER).client):
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
def test_what_is_no_tls_leaves_nothing(place, loop):
    async def play(here: Place) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*here.listener.address)
            writer.write(b"this is no TLS at all, but long enough to be seen as such" * 3)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.transport.abort()
        assert not len(here.listener._waiting)
        await here.until(lambda: not here.listener._door.knocking)
        assert not (await here.dial(here.papers.tls(PEER))).closed

    place(play, loop=loop)


def test_a_dialer_of_plain_text_is_turned_away(place):
    async def play(here: Place) -> None:
        with pytest.raises(P2PCastError):
            await here.dial(None)
        assert here.links == []

    place(play)


def test_a_plaintext_hub_is_named_as_what_it_is(papers):
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
def test_silent_connections_push_themselves_out(place, loop, monkeypatch):
    """Twice as many as there is room for, none of which says a word: an honest peer gets in, and the silent ones are not kept."""
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 16)

    async def play(here: Place) -> None:
        silent = [await asyncio.open_connection(*here.listener.address) for _ in range(32)]
        assert not (await here.dial(here.papers.tls(PEER), stripes=4)).closed
        assert here.listener._door.knocking <= 16
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
        assert not (await here.dial(here.papers.tls(PEER))).closed

    place(play, loop=loop, handshake_s=0.5)


def greeting() -> bytes:
    """A whole ClientHello."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        first_contact().wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


@LOOPS
def test_a_handshake_that_is_not_gone_on_with_is_ended(place, loop):
    async def play(here: Place) -> None:
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(greeting())
        assert await reader.readexactly(1) == b"\x16"
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.transport.abort()
        assert not (await here.dial(here.papers.tls(PEER))).closed

    place(play, loop=loop, handshake_s=0.5)


@LOOPS
@pytest.mark.parametrize("cut", [1, 4, 5, 6, -1])
def test_nothing_is_done_for_a_part_of_a_client_hello(place, loop, cut):
    """TLS is asked for nothing before the rest is there, however it comes."""

    async def play(here: Place) -> None:
        said, made = greeting(), []
        door = here.listener._door
        factory = door._factory
        door._factory = lambda: (made.append(1), factory())[1]
        reader, writer = await asyncio.open_connection(*here.listener.address)
        writer.write(said[:cut])
        # Somebody who comes later is through before.
        assert not (await here.dial(here.papers.tls(PEER))).closed
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
def test_handshakes_for_nothing_are_rationed_and_links_are_not(place, loop, monkeypatch):
    """Whoever begins handshakes and leaves gets no more of them than its ration; those who show who they are cost nothing, and get in though they share its address."""
    monkeypatch.setattr(turnstile, "BURST", 8)
    monkeypatch.setattr(turnstile, "RATE_S", 5.0)

    async def play(here: Place) -> None:
        mine, started = here.papers.tls(PEER), asyncio.get_running_loop().time()
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


def test_stopping_ends_those_that_knock(place):
    async def play(here: Place) -> None:
        readers = [await asyncio.open_connection(*here.listener.address) for _ in range(4)]
        await here.until(lambda: here.listener._door.knocking == 4)
        await here.listener.stop()
        for reader, writer in readers:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()

    place(play)


def test_without_descriptors_it_waits_and_goes_on(place, monkeypatch):
    """As when the machine has no more: nobody is accepted for a moment, then everybody who waited."""

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
        door = here.listener._door
        (sock,) = door._sockets
        asyncio.get_running_loop().remove_reader(sock)
        short = Short(sock)
        door._sockets[:] = [short]
        door._attend(short)
        assert not (await here.dial(here.papers.tls(PEER))).closed
        assert short.left < 0

    place(play)
