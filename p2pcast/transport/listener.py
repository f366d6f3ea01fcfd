"""Listening: accepts connections, lets them show their token, and gathers stripes into links."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Container
from typing import Any, Protocol

from p2pcast import limits
from p2pcast.addresses import show_address
from p2pcast.errors import IncompatibleError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.transport.binding import listening
from p2pcast.transport.door import Door
from p2pcast.transport.link import Link, LinkOwner
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
        self._links: dict[tuple[bytes, bytes], Link] = {}
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
        for link in list(self._links.values()):
            link.close()

    def _protocol(self) -> Stripe:
        connection = Connection(Side.LISTENER, self._identity, secrets.token_bytes(32))
        return Stripe(connection, self, sockets=self._sockets, handshake_s=self._handshake_s, on_made=self._on_made)

    def _on_made(self, stripe: Stripe) -> None:
        if (out := self._waiting.enter(stripe, stripe.remote_address[0])) is not None:
            out.abort(_TOO_MANY)

    def drop(self, nodes: Container[bytes], error: P2PCastError) -> None:
        """Close what these nodes have brought up."""
        for link in [link for (node, _), link in self._links.items() if node in nodes]:
            link.close(error)
        for stripe in [stripe for stripe, hello in self._orphans.items() if hello["node"] in nodes]:
            stripe.close(error)

    # -- StripeOwner, until a link takes over

    def on_established(self, stripe: Stripe, event: Established) -> None:
        self._waiting.leave(stripe)
        if self._door is not None:
            self._door.proved(stripe.remote_address[0])
        hello = event.hello
        key, number = (event.remote, hello["link"]), hello["stripe"]
        if number >= hello["stripes"]:
            stripe.close(RemoteError(f"stripe {number} of {hello['stripes']}"))
            return
        link = self._links.get(key)
        if number == 0 and link is None:
            link = Link(self._acceptor, event.remote, hello["name"], hello["stripes"])
            link.add(stripe, 0)
            self._links = {k: v for k, v in self._links.items() if not v.closed} | {key: link}
            try:
                self._acceptor.accept_link(link, hello)
            except P2PCastError as error:
                link.close(error)
                return
            for early, early_hello in list(self._orphans.items()):
                if (early_hello["node"], early_hello["link"]) == key:
                    del self._orphans[early]
                    self._join(link, early, early_hello)
        elif link is not None:
            self._join(link, stripe, hello)
        else:
            _make_room(self._orphans)
            self._orphans[stripe] = hello

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


def _make_room(stripes: dict[Stripe, Any]) -> None:
    """Aborts the oldest when there are too many: it has had the most time. So a flood pushes itself out, and an honest peer gets in."""
    if len(stripes) >= limits.MAX_HANDSHAKES:
        oldest = next(iter(stripes))
        del stripes[oldest]
        oldest.abort(_TOO_MANY)
