"""An HTTP server for one application whose callers all have the same rights.

Guarantees: connections are limited as in a daemon, so a flood of them does not lock out other callers. Callers that
disconnect are not logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import ClientConnectionError, web

from p2pcast.daemon.http_connections import (
    BACKLOG,
    CONNECTIONS,
    KEPT_S,
    Handler,
    HttpConnections,
    HttpLimits,
    bounded,
    gone,
    hold,
)
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import LocalError


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, listen: tuple[str, int], end_s: float, limits: HttpLimits | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serve ``app``, and yield its address. ``end_s``: longest time for open requests to finish. Raises LocalError if
    the address is not available.
    """
    app[CONNECTIONS] = connections = HttpConnections(limits or HttpLimits())
    app.middlewares[:0] = [bounded, _held]
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=end_s, keepalive_timeout=KEPT_S)
    await runner.setup()
    assert runner.server is not None
    connections.server = runner.server
    try:
        try:
            server = await asyncio.get_running_loop().create_server(connections, *listen, backlog=BACKLOG)
        except OSError as error:
            raise LocalError(f"cannot listen on {show_address(*listen)}: {error.strerror}") from None
        try:
            host, port = server.sockets[0].getsockname()[:2]
            yield str(host), int(port)
        finally:
            server.close()
    finally:
        await runner.cleanup()


@web.middleware
async def _held(request: web.Request, handler: Handler) -> web.StreamResponse:
    hold(request, proven=False)
    try:
        return await handler(request)
    except (ConnectionError, ClientConnectionError):
        if not gone(request):
            raise
        return web.Response(status=400)  # reaches no caller
