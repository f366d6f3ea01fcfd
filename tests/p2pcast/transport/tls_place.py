"""A hub's listener with mutual TLS, on real sockets."""

from __future__ import annotations

import asyncio
import ssl
import time

import pytest

from p2pcast.ground.errors import RefusedError
from p2pcast.process import event_loop
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.certificates import requested_key
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity, Message

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


LOOPS = pytest.mark.parametrize("loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
