"""HTTP connections: how many there may be, and how long one may last without asking or taking anything.

Promises: a connection that asks nothing is closed after SILENT_S, also when it drips its request byte by byte; a flood of such connections pushes its own oldest
ones out, so somebody who asks at once gets in; one that does not take its answer is reset by the kernel after UNTAKEN_S. Nothing here is told to a caller.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from p2pcast.limits import MAX_HTTP_CONNECTIONS, MAX_SILENT_CONNECTIONS

SILENT_S = 10.0
UNTAKEN_S = 30.0
ONE_TOO_MANY_S = 0.05
"""A connection above the limit lasts so long: its protocol is made before its transport."""
KEPT_S = 30.0
"""A connection stays open so long after an answer, for the next request."""


class Door:
    """Makes the protocol of each connection that comes in."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have not asked anything yet, oldest first; those that have gone stay until their time is up."""

    def __call__(self) -> asyncio.Protocol:
        handler: web.RequestHandler = self._server()
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(SILENT_S, self._turn_out, handler)
        if len(self._silent) > MAX_SILENT_CONNECTIONS:
            self._turn_out(next(iter(self._silent)))
        if len(self._server.connections) >= MAX_HTTP_CONNECTIONS:
            loop.call_later(ONE_TOO_MANY_S, self._turn_out, handler)
        return handler

    def asked(self, request: web.Request) -> None:
        """A whole head of a request has come."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
            sock = None if request.transport is None else request.transport.get_extra_info("socket")
            if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNTAKEN_S * 1000))

    def _turn_out(self, handler: web.RequestHandler) -> None:
        if (timer := self._silent.pop(handler, None)) is not None:
            timer.cancel()
            if handler.transport is not None:
                handler.transport.abort()
