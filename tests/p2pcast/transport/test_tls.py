"""Mutual TLS on real sockets: which certificates are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import time

import pytest

from p2pcast.ground.errors import P2PCastError, RefusedError, UntrustedError
from p2pcast.transport.enrolment import enrol
from p2pcast.trust.certificates import new_key
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls, first_contact
from p2pcast.wire import messages
from p2pcast.wire.connection import Connection, ConnectionRequest, Identity
from p2pcast.wire.connection_state import Side
from tests.p2pcast.transport.tls_place import HUB, LIMIT_S, LOOPS, PEER, TURNS, Place


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

    # A listener that challenges strangers would wait for an answer so long.
    place(play, loop=loop, handshake_s=60.0)


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
