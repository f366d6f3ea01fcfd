"""Every daemon's HTTP side: /status, /healthz, /readyz, /metrics, and the commands that it takes.

Promises: health, readiness and metrics are open; everything else needs the bearer token unless the caller is on loopback; an error is a line of JSON, never a traceback.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from p2pcast.errors import LocalError, P2PCastError, RefusedError, UsageError
from p2pcast.limits import KIB

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
MAX_REQUEST_BYTES = 64 * KIB

Document = dict[str, Any]
Command = Callable[[Document], Awaitable[Document]]


class HttpServer:
    """``status`` gives the /status document; ``ready`` says whether and why not; ``commands`` are POSTed with a JSON object."""

    def __init__(
        self,
        status: Callable[[], Document],
        ready: Callable[[], tuple[bool, str]],
        registry: CollectorRegistry,
        commands: Mapping[str, Command],
        bearer: str,
    ) -> None:
        self._status = status
        self._ready = ready
        self._registry = registry
        self._bearer = bearer
        self._runner: web.AppRunner | None = None
        self.address: tuple[str, int] = ("", 0)
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        for name, command in commands.items():
            app.router.add_post(f"/{name}", self._handler(command))
        self._app = app

    async def start(self, host: str, port: int) -> None:
        """Raises LocalError when the port can't be had."""
        self._runner = web.AppRunner(self._app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host or None, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            why = "the port is in use" if error.errno == 98 else (error.strerror or str(error))
            raise LocalError(f"cannot serve HTTP on {host}:{port}: {why}; choose another with --http HOST:PORT") from None
        address = self._runner.addresses[0]
        self.address = (str(address[0]), int(address[1]))

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not _on_loopback(request.remote):
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self._bearer}".encode()):
                return web.json_response({"error": "a bearer token is needed off loopback: the run's join token"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{error.status} {error.reason}"}, status=error.status)
        except P2PCastError as error:
            status = {UsageError: 400, RefusedError: 409, LocalError: 500}.get(type(error), 500)
            return web.json_response({"error": str(error)}, status=status)
        except Exception:  # a bug of ours must not reach the caller as a traceback
            logger.exception("request for %s failed", request.path)
            return web.json_response({"error": "internal error; see the daemon's log"}, status=500)

    def _handler(self, command: Command) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await request.json()
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
        return web.Response(text="ok\n")

    async def _get_ready(self, request: web.Request) -> web.Response:
        ready, why = self._ready()
        return web.Response(text="ready\n" if ready else f"not ready: {why}\n", status=200 if ready else 503)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _on_loopback(remote: str | None) -> bool:
    try:
        return remote is not None and ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False
