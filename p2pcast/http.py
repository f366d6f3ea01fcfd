"""Every daemon's HTTP side: /status, /healthz, /readyz, /metrics, /events, /wait, and the commands that it takes.

Promises: health, readiness and metrics are open; a command needs the bearer token, wherever its caller is, since any user of this machine may call on loopback;
everything else needs the token unless the caller is on loopback. On loopback, a caller without the token must not be a web page of another origin; an error is a line of JSON, never a traceback; a reader of /events that does not take what it is sent is dropped; nobody who waits holds up
the daemon's end. Connections that ask nothing are `http_door`'s.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from p2pcast.addresses import is_loopback, show_address
from p2pcast.errors import LocalError, P2PCastError, RefusedError, RetryableError, UsageError
from p2pcast.events import Events
from p2pcast.http_door import KEPT_S, Door
from p2pcast.limits import KIB, MAX_READERS, MAX_WAIT_S, MAX_WAITERS
from p2pcast.transport.binding import listening
from p2pcast.trust import bearer as bearer_tokens
from p2pcast.version import Version

logger = logging.getLogger(__name__)

protocol_logger = logging.getLogger(f"{__name__}.protocol")
"""Of aiohttp's reading of requests. What a caller did wrong is said to the caller, and not written down with a traceback for each."""
protocol_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/?#\s]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
READING = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
MAX_REQUEST_BYTES = 64 * KIB
HEARTBEAT_S = 15.0
"""A comment to readers of /events when there is nothing else to say: proxies cut silent connections after a minute or so."""
SLOW_S = 10.0
"""A reader of /events may leave a write untaken for so long."""
LOOK_S = 1.0
"""How often a request that waits looks whether its caller is still there."""
STOP_S = 1.0
"""Requests that are under way when the daemon ends get so long."""
DEFAULT_WAIT_S = 60.0
BODY_S = 10.0
"""For a request's body to come."""

Document = dict[str, Any]
Command = Callable[[Document], Awaitable[Document]]
Reached = Callable[[Version, float | None], tuple[bool, Document]]
"""Whether a version has been reached, by what fraction (None: the daemon's default), and what is there instead: facts for the answer."""


class HttpServer:
    """``status`` gives the /status document; ``ready`` says whether and why not; ``commands`` are POSTed with a JSON object; ``waits``: what /wait can wait for.
    Whatever changes the answer of one of these also tells an event."""

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
        bearer_file: Path = Path(bearer_tokens.FILE),
        only_here: frozenset[str] = frozenset(),
        healthy: Callable[[], tuple[bool, str]] = lambda: (True, ""),
    ) -> None:
        """``bearer_file``: the file that holds ``bearer``, for the 401's text. ``only_here``: commands whose answers hold secrets, so only callers on loopback get them.
        ``healthy``: whether the daemon is healthy, and why not."""
        self._status = status
        self._ready = ready
        self._healthy = healthy
        self._registry = registry
        self.bearer = bearer
        self._bearer_file = bearer_file
        self._events = events
        self._waits = waits
        self._waiting = 0
        self._stopping = False
        self._runner: web.AppRunner | None = None
        self._listening: list[asyncio.Server] = []
        self._door: Door | None = None
        self.address: tuple[str, int] = ("", 0)
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/events", self._get_events, allow_head=False)
        app.router.add_get("/wait", self._get_wait, allow_head=False)
        for name, command in commands.items():
            app.router.add_post(f"/{name}", self._handler(command, only_here=name in only_here))
        self._app = app

    async def start(self, host: str, port: int) -> None:
        """Raises LocalError when the port can't be had."""
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
        self._door = Door(self._runner.server)
        try:
            sockets = listening(host, port, "--http")
        except LocalError as error:
            await self._runner.cleanup()
            raise LocalError(f"cannot serve HTTP on {show_address(host, port)}: {error}") from None
        loop, address = asyncio.get_running_loop(), sockets[0].getsockname()
        self._listening = [await loop.create_server(self._door, sock=sock) for sock in sockets]
        self.address = (str(address[0]), int(address[1]))

    async def stop(self) -> None:
        self._stopping = True
        self._events.bell.ring()
        for server in self._listening:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._door is not None:
            self._door.asked(request)
        if request.path not in OPEN_PATHS and not self._bears_token(request):
            if not is_loopback(request.remote or ""):
                return _unknown("what lies in http.token of its state folder")
            if not _by_itself(request):
                return web.json_response({"error": "web pages of other origins may not speak to this daemon"}, status=403)
            if request.method not in READING:
                return _unknown(f"what lies in {self._bearer_file}")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
        except P2PCastError as error:
            status = {UsageError: 400, RefusedError: 409, LocalError: 500, RetryableError: 504}.get(type(error), 500)
            return web.json_response({"error": str(error)}, status=status)
        except Exception:  # a bug of ours must not reach the caller as a traceback
            logger.exception("request for %s failed", request.path)
            return web.json_response({"error": "internal error; see the daemon's log"}, status=500)

    def _bears_token(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self.bearer}".encode())

    def _handler(self, command: Command, *, only_here: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if only_here and not is_loopback(request.remote or ""):
                raise RefusedError("the answer would hold a secret, and HTTP is not encrypted: ask on the daemon's own machine")
            try:
                async with asyncio.timeout(BODY_S):
                    body = await request.json()
            except TimeoutError:
                raise UsageError(f"the request's body did not come within {BODY_S:g} s") from None
            except ValueError:
                raise UsageError("the request's body is not JSON") from None
            if not isinstance(body, dict):
                raise UsageError("the request's body is not a JSON object")
            return web.json_response(await command(body))

        return handle

    async def _get_status(self, request: web.Request) -> web.Response:
        # Peers report what they like; what is no JSON must not cost the whole answer.
        return web.Response(text=json.dumps(self._status(), default=repr, skipkeys=True), content_type="application/json")

    async def _get_health(self, request: web.Request) -> web.Response:
        healthy, why = self._healthy()
        return web.Response(text="ok\n" if healthy else f"unhealthy: {why}\n", status=200 if healthy else 503)

    async def _get_ready(self, request: web.Request) -> web.Response:
        ready, why = self._ready()
        return web.Response(text="ready\n" if ready else f"not ready: {why}\n", status=200 if ready else 503)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    # -- what happens

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        events = self._events
        at = _event_id(request)
        if events.readers >= MAX_READERS:
            return web.json_response({"error": f"{MAX_READERS} readers are connected already; try again later"}, status=503)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        events.readers += 1
        try:
            await self._tell(request, response, events.newest if at is None else at)
        except ConnectionResetError:
            pass  # the reader has gone
        finally:
            events.readers -= 1
        return response

    async def _tell(self, request: web.Request, response: web.StreamResponse, at: int) -> None:
        """Events after ``at``, until the reader goes, the daemon ends, or a write is not taken in time."""
        loop, events = asyncio.get_running_loop(), self._events
        await response.prepare(request)
        said_at = -math.inf
        while not self._stopping and not _gone(request):
            missed, batch = events.after(at)
            if missed is None and not batch:
                left_s = said_at + HEARTBEAT_S - loop.time()
                if left_s > 0:
                    await events.bell.wait(min(left_s, LOOK_S))
                    continue
            # The first comment says at once that the connection stands.
            text = b"".join(e.to_sse() for e in ([] if missed is None else [missed]) + batch) or b": still here\n\n"
            try:
                async with asyncio.timeout(SLOW_S):
                    await response.write(text)
            except TimeoutError:
                events.dropped += events.newest - at
                logger.info("a reader of /events at %s was too slow and is dropped", request.remote)
                if request.transport is not None:
                    request.transport.abort()
                return
            if missed is not None and not missed.restarted:
                events.dropped += missed.to - missed.since
            said_at = loop.time()
            if batch:
                at = batch[-1].id
            elif missed is not None:
                at = missed.to

    async def _get_wait(self, request: web.Request) -> web.StreamResponse:
        what, version, fraction, timeout_s = self._wait_query(request)
        if self._waiting >= MAX_WAITERS:
            return web.json_response({"error": f"{MAX_WAITERS} requests are waiting already; try again later"}, status=503)
        self._waiting += 1
        try:
            return await self._wait(request, what, version, fraction, timeout_s)
        finally:
            self._waiting -= 1

    async def _wait(
        self, request: web.Request, what: str, version: Version, fraction: float | None, timeout_s: float
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            reached, facts = self._waits[what](version, fraction)
            waited_s = loop.time() - began
            answer = {"version": str(version), "what": what, "waited_s": round(waited_s, 3)} | facts
            if reached:
                return web.json_response(answer)
            if waited_s >= timeout_s:
                error = f"version {version} is not {what} after {timeout_s:g} s"
                return web.json_response({"error": error} | answer, status=408)
            if self._stopping or _gone(request):
                return web.json_response({"error": "the daemon is stopping"} | answer, status=503)
            await self._events.bell.wait(min(timeout_s - waited_s, LOOK_S))

    def _wait_query(self, request: web.Request) -> tuple[str, Version, float | None, float]:
        """Raises UsageError."""
        query = request.query
        what = query.get("what", "live")
        if what not in self._waits:
            raise UsageError(f"what={what!r} cannot be waited for: {', '.join(self._waits)}")
        fraction = _number(query, "fraction", 1.0)
        timeout_s = _number(query, "timeout_s", MAX_WAIT_S)
        return what, Version.parse(query.get("version", "")), fraction, DEFAULT_WAIT_S if timeout_s is None else timeout_s


def _event_id(request: web.Request) -> int | None:
    """After which event to begin: 0 for all that are there, None for what comes from now on. Raises UsageError."""
    text = request.headers.get("Last-Event-ID") or request.query.get("since")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(f"{text[:40]!r} is not an event's id: give one that was sent, or 0 for all events that are still there")
    return int(text)


def _number(query: Mapping[str, str], name: str, most: float) -> float | None:
    """Raises UsageError."""
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


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _unknown(where: str) -> web.Response:
    error = f"a bearer token is needed: send the header Authorization: Bearer TOKEN, where TOKEN is {where}"
    return web.json_response({"error": error}, status=401, headers={"WWW-Authenticate": "Bearer"})


def _by_itself(request: web.Request) -> bool:
    """Whether the caller was not made to call by a web page from elsewhere, which may post blindly (it has another origin) or read answers by way of a name of its own
    that leads to loopback (then ``Host`` is that name)."""
    host = request.headers.get("Host", "")
    if (match := _HOST.fullmatch(host)) is None:
        return False
    name = match[1] or match[2]
    if not is_loopback(name) and name.lower() not in ("localhost", socket.gethostname().lower()):
        return False
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == host
