"""Listens: accepts connections, waits for their authentication, and combines stripes into links.

Guarantees: the number of links dialled by one node is bounded, and these links share one rate limit for requests
(``transport.rate_limit``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Container
from typing import Protocol

from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import IncompatibleError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.sockets.handshake_admission import PendingConnections
from p2pcast.sockets.listen_sockets import listening
from p2pcast.sockets.tls_acceptor import TlsAcceptor, handshake_places
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.rate_limit import LINK_COST, RateLimits
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import DEFAULT, HANDSHAKE_S, Stripe
from p2pcast.wire.connection import Connection, Established, Event, Identity
from p2pcast.wire.connection_state import Side
from p2pcast.wire.messages import Hello

logger = logging.getLogger("p2pcast.transport")

_TOO_MANY = RetryableError("too many handshakes at once")
MAX_OUTDATED = 64
"""Most hosts logged as incompatible, once each, so that a flood of HELLO messages cannot fill the log."""


class Acceptor(LinkOwner, Protocol):
    def accept_link(self, link: Link, hello: Hello) -> None:
        """Take over a new link, whose stripe 0 is up. Raise RemoteError or RefusedError to reject the link."""


class Listener:
    """Listening sockets at one port. ``address`` is known once started (port 0 means any free port)."""

    def __init__(
        self,
        acceptor: Acceptor,
        identity: Identity,
        tls: ssl.SSLContext | None = None,
        *,
        handshake_s: float = HANDSHAKE_S,
        sockets: Sockets = DEFAULT,
    ) -> None:
        self._acceptor = acceptor
        self._identity = identity
        self._tls = tls
        self._handshake_s = handshake_s
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []
        self._tls_acceptor: TlsAcceptor | None = None
        """Replaces ``_servers`` with TLS."""
        self._waiting: PendingConnections[Stripe] = PendingConnections(handshake_places())
        """Connections that have not been authenticated yet."""
        self._links: dict[bytes, dict[bytes, Link]] = {}
        """Links by node id and link id, oldest first."""
        self._since_sweep = 0
        """Number of links since nodes without links were last removed."""
        self._rate_limits = RateLimits()
        self._orphans: dict[Stripe, Hello] = {}
        """Stripes that arrived before stripe 0 of their link, with their HELLO, oldest first."""
        self._outdated: set[str] = set()
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int) -> None:
        """Start listening. Raises LocalError if the port is not available."""
        try:
            sockets = listening(host, port, "--listen")
        except LocalError as error:
            raise LocalError(f"cannot listen on {show_address(host, port)}: {error}") from None
        self.address = (host, int(sockets[0].getsockname()[1]))
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            self._tls_acceptor = TlsAcceptor(self._protocol, self._tls, self._handshake_s)
            self._tls_acceptor.open(sockets)
            return
        for sock in sockets:
            self._servers.append(await loop.create_server(self._protocol, sock=sock))

    async def stop(self) -> None:
        if self._tls_acceptor is not None:
            self._tls_acceptor.close()
        while self._servers:
            self._servers.pop().close()
        for stripe in [*self._waiting.all(), *self._orphans]:
            stripe.abort()
        for link in self._all():
            link.close()

    def _protocol(self) -> Stripe:
        connection = Connection(Side.LISTENER, self._identity, secrets.token_bytes(32))
        return Stripe(connection, self, sockets=self._sockets, handshake_s=self._handshake_s, on_made=self._on_made)

    def _on_made(self, stripe: Stripe) -> None:
        if (out := self._waiting.add(stripe, stripe.remote_address[0])) is not None:
            out.abort(_TOO_MANY)

    def drop(self, nodes: Container[bytes], error: P2PCastError) -> None:
        """Close all links and stripes dialled by these nodes."""
        for link in [link for link in self._all() if link.remote in nodes]:
            link.close(error)
        for stripe in [stripe for stripe, hello in self._orphans.items() if hello.node in nodes]:
            stripe.close(error)

    # -- StripeOwner, until a link takes over

    def on_established(self, stripe: Stripe, event: Established) -> None:
        self._waiting.remove(stripe)
        if self._tls_acceptor is not None:
            self._tls_acceptor.authenticated(stripe.remote_address[0])
        hello = event.hello
        node, number = event.remote, hello.stripe
        if number >= hello.stripes:
            stripe.close(RemoteError(f"stripe {number} of {hello.stripes}"))
            return
        link = self._links.get(node, {}).get(hello.link)
        if number == 0 and link is None:
            link = Link(self._acceptor, node, hello.name, hello.stripes)
            link.rate_limit = self._rate_limits.of(node, asyncio.get_running_loop().time())
            link.add(stripe, 0)
            self._add_link(node, hello.link, link)
            try:
                self._acceptor.accept_link(link, hello)
            except P2PCastError as error:
                link.close(error)
                return
            link.spend(LINK_COST)
            for early, early_hello in list(self._orphans.items()):
                if (early_hello.node, early_hello.link) == (node, hello.link):
                    del self._orphans[early]
                    self._add_stripe(link, early, early_hello)
        elif link is not None:
            self._add_stripe(link, stripe, hello)
        else:
            _make_room(self._orphans, node)
            self._orphans[stripe] = hello

    def _add_link(self, node: bytes, ident: bytes, link: Link) -> None:
        """Register a link. If its node has too many, close the node's oldest: an honest node's oldest link is one that
        has ended without this side noticing.
        """
        others = {k: v for k, v in self._links.pop(node, {}).items() if not v.closed}
        while len(others) >= limits.MAX_LINKS_PER_NODE:
            others.pop(next(iter(others))).close(
                RetryableError(f"this node has {limits.MAX_LINKS_PER_NODE} other links here")
            )
        self._links[node] = others | {ident: link}
        self._since_sweep += 1
        if self._since_sweep > len(self._links):
            self._since_sweep = 0
            self._links = {n: links for n, links in self._links.items() if any(not v.closed for v in links.values())}

    def _all(self) -> list[Link]:
        return [link for links in self._links.values() for link in links.values()]

    def _add_stripe(self, link: Link, stripe: Stripe, hello: Hello) -> None:
        if link.closed or hello.stripe in link.stripes or hello.stripes != link.expected:
            stripe.close(RemoteError("the link is closed, has this stripe already, or has another number of stripes"))
            return
        link.add(stripe, hello.stripe)
        link.on_writable(stripe)

    def on_event(self, stripe: Stripe, event: Event) -> None:
        stripe.close(RemoteError("stripe 0 of this link must come first"))

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        pass

    def on_writable(self, stripe: Stripe) -> None:
        pass

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self._waiting.remove(stripe)
        self._orphans.pop(stripe, None)
        if isinstance(error, IncompatibleError):
            self._log_outdated(stripe.remote_address[0], error)

    def _log_outdated(self, host: str, error: IncompatibleError) -> None:
        if host not in self._outdated and len(self._outdated) < MAX_OUTDATED:
            self._outdated.add(host)
            logger.warning("refused a connection from %s: %s", host, error)


def _make_room(stripes: dict[Stripe, Hello], node: bytes) -> None:
    """Abort one stripe if there is no space for one more: the node's oldest if the node has as many as a whole link,
    otherwise the oldest of all.
    """
    own = [stripe for stripe, hello in stripes.items() if hello.node == node]
    oldest = None
    if len(own) >= limits.MAX_STRIPES:
        oldest = own[0]
    elif len(stripes) >= handshake_places():
        oldest = next(iter(stripes))
    if oldest is not None:
        del stripes[oldest]
        oldest.abort(_TOO_MANY)
