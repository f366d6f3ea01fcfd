"""Limits on HTTP connections: their number, and the time without a request or without reading the answer.

Promises: a connection without a complete request head is closed after SILENT_S, even if bytes arrive one by one. A
flood of such connections closes its own oldest ones, so a client that sends its request at once is served. The kernel
resets a connection that does not read its answer within UNTAKEN_S. A closed client gets no error message.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from p2pcast.limits import MAX_HTTP_CONNECTIONS, MAX_SILENT_CONNECTIONS

SILENT_S = 10.0
"""Time limit for the first request head, in seconds."""
UNTAKEN_S = 30.0
"""Time limit for the client to acknowledge data of an answer, in seconds."""
OVER_LIMIT_S = 0.05
"""Delay in seconds before a connection above the limit is closed: its transport does not exist yet when it arrives."""
KEPT_S = 30.0
"""Time for which a connection stays open after an answer, in seconds."""


class HttpConnections:
    """Protocol factory of the HTTP server."""

    def __init__(self, server: web.Server, most: int | None = None) -> None:
        """``most``: connections, the silent ones included; None: MAX_HTTP_CONNECTIONS."""
        self._server, self._most = server, most
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections without a request yet, oldest first. A connection that has ended stays until its timer fires."""

    def __call__(self) -> asyncio.Protocol:
        handler: web.RequestHandler = self._server()
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(SILENT_S, self._abort, handler)
        if len(self._silent) > MAX_SILENT_CONNECTIONS:
            self._abort(next(iter(self._silent)))
        most = MAX_HTTP_CONNECTIONS if self._most is None else self._most
        if len(self._server.connections) >= most:
            loop.call_later(OVER_LIMIT_S, self._abort, handler)
        return handler

    def request_received(self, request: web.Request) -> None:
        """A complete request head has arrived: the connection is no longer silent."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
            sock = None if request.transport is None else request.transport.get_extra_info("socket")
            if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNTAKEN_S * 1000))

    def _abort(self, handler: web.RequestHandler) -> None:
        """Close a connection that is still silent."""
        if (timer := self._silent.pop(handler, None)) is not None:
            timer.cancel()
            if handler.transport is not None:
                handler.transport.abort()
