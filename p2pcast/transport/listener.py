"""Listening: accepts connections, lets them show their token, and gathers stripes into links.

Promises: what one node has brought up is bounded in number, and all of it together has one ration of what may be asked for (``transport.ration``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Container
from typing import Protocol

from p2pcast import limits
from p2pcast.addresses import show_address
from p2pcast.errors import IncompatibleError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.transport.binding import listening
from p2pcast.transport.door import Door
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.ration import LINK_COST, Rations
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT, HANDSHAKE_S, Stripe
from p2pcast.transport.turnstile import Crowd
from p2pcast.wire.connection import Connection, Established, Event, Identity
from p2pcast.wire.messages import Body
from p2pcast.wire.state import Side

logger = logging.getLogger("p2pcast.transport")

_TOO_MANY = RetryableError("too many handshakes at once")
MAX_OUTDATED = 64
"""Hosts of which is said, once each, that their p2pcast has to be updated: nobody fills a log by saying HELLO."""


class Acceptor(LinkOwner, Protocol):
    def accept_link(self, link: Link, hello: Body) -> None:
        """Stripe 0 of a new link is up; more may follow. Raise RemoteError or RefusedError to turn it away."""


class Listener:
    """Listening sockets at one port. ``address`` is known once started (port 0 asks for a free one)."""

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
        self._door: Door | None = None
        """Instead of servers, behind TLS."""
        self._waiting: Crowd[Stripe] = Crowd(limits.MAX_HANDSHAKES)
        """Connections that have not shown a token yet."""
        self._links: dict[bytes, dict[bytes, Link]] = {}
        """By node and link, oldest first."""
        self._swept = 0
        """Links since nodes without any were last looked for."""
        self._rations = Rations()
        self._orphans: dict[Stripe, Body] = {}
        """Stripes that came before stripe 0 of their link, oldest first, with their HELLO."""
        self._outdated: set[str] = set()
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int) -> None:
        """Raises LocalError when the port can't be had."""
        try:
            sockets = listening(host, port, "--listen")
        except LocalError as error:
            raise LocalError(f"cannot listen on {show_address(host, port)}: {error}") from None
        self.address = (host, int(sockets[0].getsockname()[1]))
        loop = asyncio.get_running_loop()
        if self._tls is not None:
            self._door = Door(self._protocol, self._tls, self._handshake_s)
            self._door.open(sockets)
            return
        for sock in sockets:
            self._servers.append(await loop.create_server(self._protocol, sock=sock))

    async def stop(self) -> None:
        if self._door is not None:
            self._door.close()
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
        if (out := self._waiting.enter(stripe, stripe.remote_address[0])) is not None:
            out.abort(_TOO_MANY)

    def drop(self, nodes: Container[bytes], error: P2PCastError) -> None:
        """Close what these nodes have brought up."""
        for link in [link for link in self._all() if link.remote in nodes]:
            link.close(error)
        for stripe in [stripe for stripe, hello in self._orphans.items() if hello["node"] in nodes]:
            stripe.close(error)

    # -- StripeOwner, until a link takes over

    def on_established(self, stripe: Stripe, event: Established) -> None:
        self._waiting.leave(stripe)
        if self._door is not None:
            self._door.proved(stripe.remote_address[0])
        hello = event.hello
        node, number = event.remote, hello["stripe"]
        if number >= hello["stripes"]:
            stripe.close(RemoteError(f"stripe {number} of {hello['stripes']}"))
            return
        link = self._links.get(node, {}).get(hello["link"])
        if number == 0 and link is None:
            link = Link(self._acceptor, node, hello["name"], hello["stripes"])
            link.ration = self._rations.of(node, asyncio.get_running_loop().time())
            link.add(stripe, 0)
            self._enter(node, hello["link"], link)
            try:
                self._acceptor.accept_link(link, hello)
            except P2PCastError as error:
                link.close(error)
                return
            link.spend(LINK_COST)
            for early, early_hello in list(self._orphans.items()):
                if (early_hello["node"], early_hello["link"]) == (node, hello["link"]):
                    del self._orphans[early]
                    self._join(link, early, early_hello)
        elif link is not None:
            self._join(link, stripe, hello)
        else:
            _make_room(self._orphans, node)
            self._orphans[stripe] = hello

    def _enter(self, node: bytes, ident: bytes, link: Link) -> None:
        """The oldest of a node that has too many gives way: of an honest one that is a link whose end has not been noticed here."""
        others = {k: v for k, v in self._links.pop(node, {}).items() if not v.closed}
        while len(others) >= limits.MAX_LINKS_OF_NODE:
            others.pop(next(iter(others))).close(RetryableError(f"this node has {limits.MAX_LINKS_OF_NODE} other links here"))
        self._links[node] = others | {ident: link}
        self._swept += 1
        if self._swept > len(self._links):
            self._swept = 0
            self._links = {n: links for n, links in self._links.items() if any(not v.closed for v in links.values())}

    def _all(self) -> list[Link]:
        return [link for links in self._links.values() for link in links.values()]

    def _join(self, link: Link, stripe: Stripe, hello: Body) -> None:
        if link.closed or hello["stripe"] in link.stripes or hello["stripes"] != link.expected:
            stripe.close(RemoteError("that link is closed, has this stripe, or was to have another number of stripes"))
            return
        link.add(stripe, hello["stripe"])
        link.on_writable(stripe)

    def on_event(self, stripe: Stripe, event: Event) -> None:
        stripe.close(RemoteError("stripe 0 of this link must come first"))

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        pass

    def on_writable(self, stripe: Stripe) -> None:
        pass

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self._waiting.leave(stripe)
        self._orphans.pop(stripe, None)
        if isinstance(error, IncompatibleError):
            self._tell(stripe.remote_address[0], error)

    def _tell(self, host: str, error: IncompatibleError) -> None:
        if host not in self._outdated and len(self._outdated) < MAX_OUTDATED:
            self._outdated.add(host)
            logger.warning("refused a connection from %s: %s", host, error)


def _make_room(stripes: dict[Stripe, Body], node: bytes) -> None:
    """Aborts the oldest of the node itself when it has as many as a link may, else of all when there are too many: it has had the most time."""
    own = [stripe for stripe, hello in stripes.items() if hello["node"] == node]
    oldest = own[0] if len(own) >= limits.MAX_STRIPES else next(iter(stripes)) if len(stripes) >= limits.MAX_HANDSHAKES else None
    if oldest is not None:
        del stripes[oldest]
        oldest.abort(_TOO_MANY)
