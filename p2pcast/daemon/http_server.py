"""A daemon's HTTP server: /status, /healthz, /readyz, /metrics, /events, /wait, and the daemon's commands.

Promises, on access: health, readiness and metrics are open. A command needs the bearer token from any caller, because
any user of this machine can call on loopback. Everything else needs the token unless the caller is on loopback. A
loopback caller without the token must not be a web page of another origin.

Promises, on answers: an error is a line of JSON, never a traceback. A reader of /events that does not read is
disconnected. Waiting requests do not delay the daemon's end. `http_connections` limits connections, and a flood of them
keeps no caller away. A caller that goes away is no error.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import ClientConnectionError, web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

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
from p2pcast.ground.addresses import is_loopback, show_address
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RetryableError, UsageError
from p2pcast.ground.limits import KIB, MAX_READERS, MAX_STEP, MAX_WAIT_S, MAX_WAITERS
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.sockets.listen_sockets import listening
from p2pcast.sockets.tls_acceptor import TlsAcceptor
from p2pcast.trust import bearer_tokens as bearer_tokens

logger = logging.getLogger("p2pcast.http")

protocol_logger = logging.getLogger("p2pcast.http.protocol")
"""aiohttp's logger for the parsing of requests. Callers' errors are answered to the callers, and not logged with a
traceback each.
"""
_CALLERS_ERRORS = (HttpProcessingError, web.RequestPayloadError)
protocol_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CALLERS_ERRORS)))

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/?#\s]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
READING = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
MAX_REQUEST_BYTES = 64 * KIB
HEARTBEAT_S = 15.0
"""Interval in seconds of comments to idle readers of /events: proxies close silent connections after about a minute."""
SLOW_S = 10.0
"""Time limit in seconds for a reader of /events to accept a write."""
CHECK_S = 1.0
"""Interval in seconds at which a waiting request checks that its caller is still connected."""
STOP_S = 1.0
"""Time in seconds for running requests to finish when the daemon ends."""
DEFAULT_WAIT_S = 60.0
HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake, in seconds."""
BODY_S = 10.0
"""Time limit for a command's body, in seconds."""
DEFAULT_LIMITS = HttpLimits()

STATUSES = {UsageError: 400, BodyTooLargeError: 413, RefusedError: 409, LocalError: 500, RetryableError: 504}

Document = dict[str, Any]
Command = Callable[[Document], Awaitable[Document]]
Reached = Callable[[Version, float | None], tuple[bool, Document]]
"""(version, fraction of the peers; None: the daemon's default) → whether the version is reached, and facts for the
answer.
"""


class HttpServer:
    """``status``: the /status document. ``ready``: whether the daemon is ready, and why not. ``commands``: handlers of
    POST /NAME, called with a JSON object. ``waits``: conditions for /wait. Each change of these answers must also emit
    an event.
    """

    def __init__(
        self,
        status: Callable[[], Document],
        ready: Callable[[], tuple[bool, str]],
        registry: CollectorRegistry,
        commands: Mapping[str, Command],
        bearer: str,
        events: Events,
        waits: Mapping[str, Reached],
        *,
        newest: Callable[[], Version | None] = lambda: None,
        folder_version: Callable[[str], Awaitable[Version | None]] | None = None,
        bearer_file: Path = Path(bearer_tokens.FILE),
        local_only: frozenset[str] = frozenset(),
        healthy: Callable[[], tuple[bool, str]] = lambda: (True, ""),
        documents: Mapping[str, Callable[[], Document]] = MappingProxyType({}),
        routes: Iterable[web.RouteDef] = (),
        admits: Callable[[web.Request], bool] = lambda _: False,
        limits: HttpLimits = DEFAULT_LIMITS,
    ) -> None:
        """``newest``: the newest known version, whose branch counts for steps in /wait. ``folder_version``: the version
        of a step folder's content, for /wait; None while it is not published; it may raise UsageError.
        ``bearer_file``: the file of ``bearer``, for the text of a 401. ``local_only``: commands whose answers hold
        secrets, available on loopback only. ``healthy``: whether the daemon is healthy, and why not.
        ``documents``: of GET /NAME, besides /status. ``routes``: of the daemon itself. ``admits``: whether a caller
        without the bearer token may send this request. ``limits``: of connections.
        """
        self._status = status
        self._ready = ready
        self._healthy = healthy
        self._admits = admits
        self._registry = registry
        self.bearer = bearer
        self._bearer_file = bearer_file
        self._events = events
        self._waits = waits
        self._newest = newest
        self._folder_version = folder_version
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
        for name, document in documents.items():
            app.router.add_get(f"/{name}", self._reader(document))
        for name, command in commands.items():
            app.router.add_post(f"/{name}", self._handler(command, local_only=name in local_only))
        app.router.add_routes(routes)
        self._app = app

    async def start(self, host: str, port: int) -> None:
        """Listen and serve. Raises LocalError when the port is not available."""
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
        if self._bears_token(request):
            self._connections.hold(request, proven=True)
        elif request.path not in OPEN_PATHS and not self._admits(request):
            if not is_loopback(request.remote or ""):
                return _unauthorized("in http.token of the daemon's state folder")
            if not _same_origin(request):
                return web.json_response(
                    {"error": "web pages of other origins may not send requests to this daemon"}, status=403
                )
            if request.method not in READING:
                return _unauthorized(f"in {self._bearer_file}")
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

    def _bears_token(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self.bearer}".encode())

    def _most(self, strangers: int, request: web.Request) -> int:
        """Other users of this machine may take as many places as ``strangers``. The bearer opens as many more."""
        return 2 * strangers if self._bears_token(request) else strangers

    def _handler(self, command: Command, *, local_only: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if local_only and not _is_local(request):
                raise RefusedError(
                    "the answer holds a secret and HTTP is not encrypted: send this request from the daemon's machine"
                )
            body = await read_json(request, MAX_REQUEST_BYTES, BODY_S)
            if not isinstance(body, dict):
                raise UsageError("the request's body is not a JSON object")
            return web.json_response(await command(body))

        return handle

    def _reader(self, document: Callable[[], Document]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def read(request: web.Request) -> web.Response:
            return web.json_response(document())

        return read

    async def _get_status(self, request: web.Request) -> web.Response:
        # Peers report arbitrary values: a value that JSON cannot hold must not fail the whole answer.
        return web.Response(
            text=json.dumps(self._status(), default=repr, skipkeys=True), content_type="application/json"
        )

    async def _get_health(self, request: web.Request) -> web.Response:
        healthy, why = self._healthy()
        return web.Response(text="ok\n" if healthy else f"unhealthy: {why}\n", status=200 if healthy else 503)

    async def _get_ready(self, request: web.Request) -> web.Response:
        ready, why = self._ready()
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
        what, wanted, fraction, timeout_s = self._wait_query(request)
        if self._waiting >= (most := self._most(MAX_WAITERS, request)):
            return web.json_response({"error": f"{most} requests are waiting already; try again later"}, status=503)
        hold(request, proven=False)
        self._waiting += 1
        try:
            return await self._wait(request, what, wanted, fraction, timeout_s)
        finally:
            self._waiting -= 1

    async def _wait(
        self, request: web.Request, what: str, wanted: Version | int | str, fraction: float | None, timeout_s: float
    ) -> web.StreamResponse:
        """``wanted``: a version, a step of the newest branch, or a folder's name."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            version = await self._wanted_version(wanted)
            reached, facts = (False, {}) if version is None else self._waits[what](version, fraction)
            waited_s = loop.time() - began
            named = None if version is None else str(version)
            answer = {"version": named, "what": what, "waited_s": round(waited_s, 3)} | facts
            if reached:
                return web.json_response(answer)
            if waited_s >= timeout_s:
                thing = f"folder {wanted}" if version is None else f"version {version}"
                error = f"{thing} is not {what} after {timeout_s:g} s"
                return web.json_response({"error": error} | answer, status=408)
            if self._stopping or gone(request):
                return web.json_response({"error": "the daemon is stopping"} | answer, status=503)
            await self._events.wakeup.wait(min(timeout_s - waited_s, CHECK_S))

    async def _wanted_version(self, wanted: Version | int | str) -> Version | None:
        """None while a folder's content is not published. Raises UsageError."""
        if isinstance(wanted, str):
            if self._folder_version is None:
                raise UsageError("only a hub knows folders: give version=BRANCH.STEP, or step=STEP")
            return await self._folder_version(wanted)
        newest = self._newest() or Version(0, 0)
        return wanted if isinstance(wanted, Version) else Version(newest.branch, wanted)

    def _wait_query(self, request: web.Request) -> tuple[str, Version | int | str, float | None, float]:
        """The parameters of /wait: condition, what to wait for, fraction, timeout in seconds. Raises UsageError."""
        query = request.query
        what = query.get("what", "live")
        if what not in self._waits:
            raise UsageError(f"what={what!r} cannot be waited for: give one of {', '.join(self._waits)}")
        fraction = _number(query, "fraction", 1.0)
        timeout_s = _number(query, "timeout_s", MAX_WAIT_S)
        return what, _wanted(query), fraction, DEFAULT_WAIT_S if timeout_s is None else timeout_s


def _event_id(request: web.Request) -> int | None:
    """The event after which to begin. 0: all events in the ring; None: only new events. Raises UsageError."""
    text = request.headers.get("Last-Event-ID") or request.query.get("since")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(
            f"{text[:40]!r} is not an event's id: give the id of an earlier event, or 0 for all stored events"
        )
    return int(text)


def _wanted(query: Mapping[str, str]) -> Version | int | str:
    """A version, a step of the newest branch, or a folder's name. Raises UsageError."""
    if sum(name in query for name in ("version", "step", "folder")) != 1:
        raise UsageError("give one of version=BRANCH.STEP, step=STEP of the newest branch, and folder=NAME at a hub")
    if "folder" in query:
        return query["folder"]
    text = query.get("step")
    if text is None:
        return Version.parse(query["version"])
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_STEP):
        raise UsageError(f"step={text[:40]!r} is not a number from 0 to {MAX_STEP}")
    return int(text)


def _number(query: Mapping[str, str], name: str, most: float) -> float | None:
    """A number from 0 to ``most``; None when absent. Raises UsageError."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise UsageError(f"{name}={text[:40]!r} is not a number from 0 to {most:g}")
    return value


def _is_local(request: web.Request) -> bool:
    """Whether the caller is on this machine: at loopback, or at the address that it has connected to."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return is_loopback(request.remote or "") or (isinstance(own, tuple) and request.remote == own[0])


def _unauthorized(where: str) -> web.Response:
    error = f"a bearer token is needed: send the header Authorization: Bearer TOKEN; the TOKEN is {where}"
    return web.json_response({"error": error}, status=401, headers={"WWW-Authenticate": "Bearer"})


def _same_origin(request: web.Request) -> bool:
    """False when a web page of another origin may have caused the request. Such a page can post blindly; then
    ``Origin`` differs. With DNS rebinding it can also read answers; then ``Host`` is the page's own name.
    """
    host = request.headers.get("Host", "")
    if (match := _HOST.fullmatch(host)) is None:
        return False
    name = match[1] or match[2]
    if not is_loopback(name) and name.lower() not in ("localhost", socket.gethostname().lower()):
        return False
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == host
