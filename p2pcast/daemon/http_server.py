"""A daemon's HTTP server: /status, /healthz, /readyz, /metrics, /events, /wait, and the daemon's commands.

Guarantees: an error is a line of JSON, never a traceback. A reader of /events that stops reading is disconnected.
Waiting requests do not delay shutdown. `http_connections` limits connections, so a flood does not lock out callers.
A caller that disconnects is not an error. `http_access` decides which caller may send which request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from aiohttp import ClientConnectionError, web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from p2pcast.daemon.http_access import HttpAccess
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
from p2pcast.daemon.request_body import BodyTooLargeError, read_json
from p2pcast.daemon.version_waits import NO_WAITS, VersionWaits, WaitQuery
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RetryableError, UsageError
from p2pcast.ground.limits import KIB, MAX_READERS, MAX_WAITERS
from p2pcast.process import metric_kinds
from p2pcast.process.events import Events
from p2pcast.sockets.listen_sockets import listening
from p2pcast.sockets.tls_acceptor import TlsAcceptor

logger = logging.getLogger("p2pcast.http")

protocol_logger = logging.getLogger("p2pcast.http.protocol")
"""aiohttp's logger for the parsing of requests. Callers' errors are answered to the callers, and not logged with a
traceback each.
"""
_CALLERS_ERRORS = (HttpProcessingError, web.RequestPayloadError)
protocol_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CALLERS_ERRORS)))

MAX_REQUEST_BYTES = 64 * KIB
HEARTBEAT_S = 15.0
"""Interval in seconds of comments to idle readers of /events: proxies close silent connections after about a minute."""
SLOW_S = 10.0
"""Time limit in seconds for a reader of /events to accept a write."""
CHECK_S = 1.0
"""Interval in seconds at which a waiting request checks that its caller is still connected."""
STOP_S = 1.0
"""Time in seconds for running requests to finish when the daemon ends."""
HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake, in seconds."""
BODY_S = 10.0
"""Time limit for a command's body, in seconds."""
DEFAULT_LIMITS = HttpLimits()

STATUSES = {UsageError: 400, BodyTooLargeError: 413, RefusedError: 409, LocalError: 500, RetryableError: 504}

Document = dict[str, Any]
Command = Callable[[Document], Awaitable[Document]]


class DaemonView(Protocol):
    """How a daemon shows itself. ``ready`` and ``healthy``: whether it is, and why not. ``families``: its metrics."""

    def status(self) -> Document: ...

    def ready(self) -> tuple[bool, str]:
        return True, ""

    def healthy(self) -> tuple[bool, str]:
        return True, ""

    def families(self) -> Iterable[Metric]:
        return ()


class HttpServer:
    """``commands``: handlers of POST /NAME, called with a JSON object. ``waits``: for /wait. ``routes``: of the daemon
    itself. Each change of the view and of the waits' answers must also emit an event.
    """

    def __init__(
        self,
        view: DaemonView,
        access: HttpAccess,
        events: Events,
        commands: Mapping[str, Command] = MappingProxyType({}),
        *,
        waits: VersionWaits = NO_WAITS,
        routes: Iterable[web.RouteDef] = (),
        limits: HttpLimits = DEFAULT_LIMITS,
    ) -> None:
        self.access = access
        self._view = view
        self._registry = metric_kinds.registry(view.families)
        self._events = events
        self._waits = waits
        self._waiting = 0
        self._stopping = False
        self._runner: web.AppRunner | None = None
        self._listening: list[asyncio.Server] = []
        self._acceptors: list[TlsAcceptor] = []
        self._connections = HttpConnections(limits)
        self.address: tuple[str, int] = ("", 0)
        app = web.Application(middlewares=[bounded, self._guard])
        app[CONNECTIONS] = self._connections
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/events", self._get_events, allow_head=False)
        app.router.add_get("/wait", self._get_wait, allow_head=False)
        for name, command in commands.items():
            app.router.add_post(f"/{name}", self._handler(name, command))
        app.router.add_routes(routes)
        self._app = app

    async def start(self, host: str, port: int) -> None:
        """Listen and serve. Raises LocalError if the port is not available."""
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=protocol_logger,
            handle_signals=False,
            shutdown_timeout=STOP_S,
            keepalive_timeout=KEPT_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections.server = self._runner.server
        try:
            self.address = await self.listen(host, port, "--http")
        except LocalError:
            await self._runner.cleanup()
            raise

    async def listen(self, host: str, port: int, option: str, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Serve on one more address, and return it. ``option``: the address's, for errors. Raises LocalError when the
        port is not available.
        """
        try:
            sockets = listening(host, port, option)
        except LocalError as error:
            raise LocalError(f"cannot serve HTTP on {show_address(host, port)}: {error}") from None
        loop, address = asyncio.get_running_loop(), sockets[0].getsockname()
        if tls is None:
            self._listening += [await loop.create_server(self._connections, sock=s, backlog=BACKLOG) for s in sockets]
        else:
            acceptor = TlsAcceptor(self._connections, tls, HANDSHAKE_S)
            acceptor.open(sockets)
            self._acceptors.append(acceptor)
        return str(address[0]), int(address[1])

    async def stop(self) -> None:
        self._stopping = True
        self._events.wakeup.notify()
        for server in self._listening:
            server.close()
        for acceptor in self._acceptors:
            acceptor.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.access.bears_token(request):
            self._connections.hold(request, proven=True)
        elif (refusal := self.access.refusal(request)) is not None:
            return refusal
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
        except P2PCastError as error:
            return web.json_response({"error": str(error)}, status=STATUSES.get(type(error), 500))
        except Exception as error:
            if isinstance(error, (ConnectionError, ClientConnectionError)) and gone(request):
                return web.json_response({"error": "the caller has gone"}, status=400)  # reaches no caller
            # A bug: the traceback goes to the log, not to the caller.
            logger.exception("HTTP request for %s failed with an internal error", request.path)
            return web.json_response({"error": "internal error; see the daemon's log"}, status=500)

    def _most(self, strangers: int, request: web.Request) -> int:
        """Return the limit for this caller: ``strangers``, or twice that if it has the bearer token."""
        return 2 * strangers if self.access.bears_token(request) else strangers

    def _handler(self, name: str, command: Command) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            self.access.check_local(name, request)
            body = await read_json(request, MAX_REQUEST_BYTES, BODY_S)
            if not isinstance(body, dict):
                raise UsageError("the request's body is not a JSON object")
            return web.json_response(await command(body))

        return handle

    async def _get_status(self, request: web.Request) -> web.Response:
        # Peers report arbitrary values: a value that JSON cannot hold must not fail the whole answer.
        return web.Response(
            text=json.dumps(self._view.status(), default=repr, skipkeys=True), content_type="application/json"
        )

    async def _get_health(self, request: web.Request) -> web.Response:
        healthy, why = self._view.healthy()
        return web.Response(text="ok\n" if healthy else f"unhealthy: {why}\n", status=200 if healthy else 503)

    async def _get_ready(self, request: web.Request) -> web.Response:
        ready, why = self._view.ready()
        text = "ready" + (f", but {why}" if why else "") if ready else f"not ready: {why}"
        return web.Response(text=f"{text}\n", status=200 if ready else 503)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    # -- events and waiting

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        events = self._events
        at = _event_id(request)
        if events.readers >= (most := self._most(MAX_READERS, request)):
            return web.json_response({"error": f"{most} readers are connected already; try again later"}, status=503)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        hold(request, proven=False)
        events.readers += 1
        try:
            await self._send_events(request, response, events.newest if at is None else at)
        except ConnectionResetError:
            pass  # the reader has disconnected
        finally:
            events.readers -= 1
        return response

    async def _send_events(self, request: web.Request, response: web.StreamResponse, at: int) -> None:
        """Send the events after ``at``, until the reader disconnects, the daemon ends, or a write takes over SLOW_S."""
        loop, events = asyncio.get_running_loop(), self._events
        await response.prepare(request)
        sent_at = -math.inf
        while not self._stopping and not gone(request):
            missed, batch = events.after(at)
            if missed is None and not batch:
                left_s = sent_at + HEARTBEAT_S - loop.time()
                if left_s > 0:
                    await events.wakeup.wait(min(left_s, CHECK_S))
                    continue
            # The first comment goes out at once and confirms the connection.
            told = [] if missed is None else [missed.to_sse()]
            told += [event.to_sse(events.run) for event in batch]
            text = b"".join(told) or b": still here\n\n"
            try:
                async with asyncio.timeout(SLOW_S):
                    await response.write(text)
            except TimeoutError:
                events.dropped += events.newest - at
                logger.info("/events: disconnected a reader at %s that did not read for %g s", request.remote, SLOW_S)
                if request.transport is not None:
                    request.transport.abort()
                return
            if missed is not None and not missed.restarted:
                events.dropped += missed.to - missed.since
            sent_at = loop.time()
            if batch:
                at = batch[-1].id
            elif missed is not None:
                at = missed.to

    async def _get_wait(self, request: web.Request) -> web.StreamResponse:
        asked = self._waits.read(request.query)
        if self._waiting >= (most := self._most(MAX_WAITERS, request)):
            return web.json_response({"error": f"{most} requests are waiting already; try again later"}, status=503)
        hold(request, proven=False)
        self._waiting += 1
        try:
            return await self._wait(request, asked)
        finally:
            self._waiting -= 1

    async def _wait(self, request: web.Request, asked: WaitQuery) -> web.StreamResponse:
        loop, what = asyncio.get_running_loop(), asked.what
        began = loop.time()
        while True:
            version = await self._waits.version(asked.wanted)
            reached, facts = (False, {}) if version is None else self._waits.conditions[what](version, asked.fraction)
            waited_s = loop.time() - began
            named = None if version is None else str(version)
            answer = {"version": named, "what": what, "waited_s": round(waited_s, 3)} | facts
            if reached:
                return web.json_response(answer)
            if waited_s >= asked.timeout_s:
                thing = f"folder {asked.wanted}" if version is None else f"version {version}"
                error = f"{thing} is not {what} after {asked.timeout_s:g} s"
                return web.json_response({"error": error} | answer, status=408)
            if self._stopping or gone(request):
                return web.json_response({"error": "the daemon is stopping"} | answer, status=503)
            await self._events.wakeup.wait(min(asked.timeout_s - waited_s, CHECK_S))


def document_route(name: str, document: Callable[[], Document]) -> web.RouteDef:
    """Return a route for GET /NAME that answers with a document."""

    async def read(request: web.Request) -> web.Response:
        return web.json_response(document())

    return web.get(f"/{name}", read)


def _event_id(request: web.Request) -> int | None:
    """Return the id after which to begin: 0 for all events in the ring, None for only new ones. Raises UsageError."""
    text = request.headers.get("Last-Event-ID") or request.query.get("since")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(
            f"{text[:40]!r} is not an event's id: give the id of an earlier event, or 0 for all stored events"
        )
    return int(text)
