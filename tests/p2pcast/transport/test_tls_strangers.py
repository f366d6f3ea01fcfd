"""Connections to a listener with TLS that speak something else, are cut short, are slow, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import ssl
import weakref

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.process import event_loop
from p2pcast.sockets import handshake_admission
from p2pcast.sockets.tls_acceptor import handshake_places
from p2pcast.transport.listener import Listener
from p2pcast.trust.tls_contexts import first_contact
from tests.p2pcast.transport.tls_place import LIMIT_S, LOOPS, PEER, Place


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
def test_an_abandoned_handshake_is_closed(place, loop, monkeypatch):
    async def play(here: Place) -> None:
        running, limits_s = asyncio.get_running_loop(), []
        accept = running.connect_accepted_socket

        async def accepted(*words, **options):
            limits_s.append(options.get("ssl_handshake_timeout"))
            return await accept(*words, **options)

        monkeypatch.setattr(running, "connect_accepted_socket", accepted)
        said = b""
        while not said:  # on a machine that stood still, the time of a handshake is over before its answer
            reader, writer = await asyncio.open_connection(*here.listener.address)
            writer.write(greeting())
            with contextlib.suppress(ConnectionResetError):
                said = await reader.read(1)
        assert said == b"\x16"
        # Without a limit of its own, the loop closes the connection after a minute.
        limit_s = limits_s[-1]
        assert limit_s is not None
        assert 0 < limit_s <= 1
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

    reported: list[str] = []

    async def play(here: Place) -> None:
        acceptor = here.listener._tls_acceptor
        (sock,) = acceptor._sockets
        asyncio.get_running_loop().remove_reader(sock)
        short = Short(sock)
        acceptor._sockets[:] = [short]
        acceptor._watch(short)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        assert not (await here.dial(here.certificate.tls(PEER))).closed
        assert short.left < 0
        assert set(reported) == {"accepting connections"}, "the daemon is unhealthy for a while"

    place(play)


@pytest.mark.parametrize(("descriptors", "places"), [(4, 1), (256, 32), (1 << 20, 256), (resource.RLIM_INFINITY, 256)])
def test_strangers_get_a_share_of_the_descriptors(monkeypatch, descriptors, places):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert handshake_places() == places
