"""Listening: accepts connections, lets them show their token, and gathers stripes into links."""

from __future__ import annotations

import asyncio
import errno
import secrets
import ssl
from typing import Protocol

from p2pcast import limits
from p2pcast.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Connection, Established, Event, Identity
from p2pcast.wire.messages import Body
from p2pcast.wire.state import Side


class Acceptor(LinkOwner, Protocol):
    def accept_link(self, link: Link, hello: Body) -> None:
        """Stripe 0 of a new link is up; more may follow. Raise RemoteError or RefusedError to turn it away."""


class Listener:
    """One listening socket. ``address`` is known once started (port 0 asks for a free one)."""

    def __init__(self, acceptor: Acceptor, identity: Identity, tls: ssl.SSLContext | None = None) -> None:
        self._acceptor = acceptor
        self._identity = identity
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._waiting: dict[Stripe, None] = {}
        """Connections that have not shown a token yet, oldest first."""
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._orphans: dict[tuple[bytes, bytes], list[tuple[Stripe, int]]] = {}
        """Stripes that came before stripe 0 of their link."""
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int) -> None:
        """Raises LocalError when the port can't be had."""
        try:
            self._server = await asyncio.get_running_loop().create_server(self._protocol, host or None, port, ssl=self._tls)
        except OSError as error:
            reason = "the port is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
            raise LocalError(f"cannot listen on {host}:{port}: {reason}; choose another with --listen HOST:PORT") from None
        name = self._server.sockets[0].getsockname()
        self.address = (host, int(name[1]))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for stripe in list(self._waiting):
            stripe.abort()
        for orphans in list(self._orphans.values()):
            for stripe, _ in orphans:
                stripe.abort()
        for link in list(self._links.values()):
            link.close()

    def _protocol(self) -> Stripe:
        stripe = Stripe(Connection(Side.LISTENER, self._identity, secrets.token_bytes(32)), self)
        if len(self._waiting) >= limits.MAX_HANDSHAKES:
            # The oldest has had the most time: a flood pushes itself out, and an honest peer gets in.
            next(iter(self._waiting)).abort(RetryableError("too many handshakes at once"))
        self._waiting[stripe] = None
        return stripe

    # -- StripeOwner, until a link takes over

    def on_established(self, stripe: Stripe, event: Established) -> None:
        self._waiting.pop(stripe, None)
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
            for early, early_number in self._orphans.pop(key, []):
                self._join(link, early, early_number)
        elif link is not None:
            self._join(link, stripe, number)
        elif sum(map(len, self._orphans.values())) < limits.MAX_HANDSHAKES:
            self._orphans.setdefault(key, []).append((stripe, number))
        else:
            stripe.close(RetryableError("too many stripes wait for their link"))

    def _join(self, link: Link, stripe: Stripe, number: int) -> None:
        if link.closed or number in link.stripes or number >= link.expected:
            stripe.close(RemoteError("that link is closed, or has this stripe"))
            return
        link.add(stripe, number)
        link.on_writable(stripe)

    def on_event(self, stripe: Stripe, event: Event) -> None:
        stripe.close(RemoteError("stripe 0 of this link must come first"))

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        pass

    def on_writable(self, stripe: Stripe) -> None:
        pass

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self._waiting.pop(stripe, None)
        for key, orphans in list(self._orphans.items()):
            self._orphans[key] = [o for o in orphans if o[0] is not stripe]
            if not self._orphans[key]:
                del self._orphans[key]
