"""HTTP connections: their places, and their time limits.

Guarantees:

- ``ConnectionPlaces`` bounds the number of connections, of all callers and of each address. The bound of all callers is
  a share of the descriptors that this process may open: the others stay free for links, files and the install socket.
- A connection that loses its place is closed, whatever it has sent.
- A connection without a complete request head is closed after SILENT_S, even if bytes arrive one by one; after an
  answer, after KEPT_S. The kernel resets a connection that does not read its answer within UNTAKEN_S.
- A client whose connection is closed gets no error message. One line per minute is logged about such clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

from aiohttp import web

from p2pcast.daemon.connection_places import ConnectionPlaces
from p2pcast.ground.limits import MAX_HTTP_CONNECTIONS, MIN_ADDRESS_CONNECTIONS, MIN_HTTP_CONNECTIONS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger("p2pcast.http")

SILENT_S = 10.0
"""Time limit for the first request head, in seconds."""
UNTAKEN_S = 30.0
"""Time limit for the client to acknowledge data of an answer, in seconds."""
KEPT_S = 30.0
"""Time for which a connection stays open after an answer, in seconds."""
BACKLOG = 512
"""Connections that the kernel queues until they are accepted. Beyond that, callers try again after a second."""
NOTICE_S: Final = 60.0
"""Shortest time in seconds between two lines of the log about closed connections."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """``of_address``: connections of one address; None: half of all, and at least MIN_ADDRESS_CONNECTIONS. ``share``:
    of the descriptors that the process may open. ``most``: connections, whatever the share.
    """

    of_address: int | None = None
    share: float = 1 / 4
    most: int = MAX_HTTP_CONNECTIONS

    def places(self, descriptors: int) -> ConnectionPlaces[HttpConnection]:
        """``descriptors``: that the process may open."""
        most = max(MIN_HTTP_CONNECTIONS, min(self.most, int(self.share * descriptors)))
        return ConnectionPlaces(most, self.of_address or max(MIN_ADDRESS_CONNECTIONS, most // 2))


def descriptor_limit() -> int:
    """Return the number of files that this process may have open at the same time."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


class HttpConnections:
    """Protocol factory of an HTTP server."""

    server: web.Server

    def __init__(self, limits: HttpLimits) -> None:
        """``server`` is set before the first connection."""
        self.places = limits.places(descriptor_limit())
        self._by_handler: dict[web.RequestHandler, HttpConnection] = {}
        self._closed, self._noticed_s = 0, -NOTICE_S

    def __call__(self) -> asyncio.Protocol:
        return HttpConnection(self)

    @contextlib.contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Context manager for the time in which a request, whose complete head has arrived, is being answered."""
        one = self._by_handler.get(request.protocol)
        if one is not None:
            one.silence.cancel()
            self.places.touch(one)
        try:
            yield
        finally:
            if one is not None:
                self.places.touch(one)

    def hold(self, request: web.Request, *, proven: bool) -> None:
        """See ``hold``."""
        if (one := self._by_handler.get(request.protocol)) is not None:
            self.places.hold(one, proven=proven)

    # -- called by connections

    def begun(self, one: HttpConnection, host: str) -> None:
        self._by_handler[one.handler] = one
        if (out := self.places.add(one, host)) is not None:
            out.abort()
            self._notice()

    def ended(self, one: HttpConnection) -> None:
        self.places.remove(one)
        self._by_handler.pop(one.handler, None)

    def _notice(self) -> None:
        self._closed, now = self._closed + 1, asyncio.get_running_loop().time()
        if now >= self._noticed_s + NOTICE_S:
            self._noticed_s = now
            logger.warning(
                "HTTP connections closed to make room for others so far: %d; %d may be open, %d of one address",
                self._closed,
                self.places.most,
                self.places.most_of_address,
            )


class HttpConnection(asyncio.Protocol):
    """One connection: aiohttp's protocol, which it passes everything to."""

    handler: web.RequestHandler
    silence: asyncio.TimerHandle
    """Ends the connection, until its first request."""

    def __init__(self, owner: HttpConnections) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.handler = self._owner.server()
        self.silence = asyncio.get_running_loop().call_later(SILENT_S, self.abort)
        if hasattr(socket, "TCP_USER_TIMEOUT") and (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNTAKEN_S * 1000))
        name = transport.get_extra_info("peername")
        self._owner.begun(self, str(name[0]) if isinstance(name, tuple) else "")
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> None:
        self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.silence.cancel()
        self._owner.ended(self)
        self.handler.connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once, in any state."""
        if self._transport is not None:
            self._transport.abort()


CONNECTIONS = web.AppKey("connections", HttpConnections)


def hold(request: web.Request, *, proven: bool) -> None:
    """Keep the place of the request's connection until the answer. ``proven``: the caller has proven a right."""
    request.app[CONNECTIONS].hold(request, proven=proven)


def gone(request: web.Request) -> bool:
    """Whether the request's caller has gone."""
    return request.transport is None or request.transport.is_closing()


@web.middleware
async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that reports requests to the application's ``HttpConnections``."""
    with request.app[CONNECTIONS].answering(request):
        return await handler(request)
