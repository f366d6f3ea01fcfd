"""Decides which caller may send which request to a daemon's HTTP server.

Guarantees: health, readiness and metrics are open. A command needs the bearer token from any caller, because any user
of this machine can call on loopback. Everything else needs the token unless the caller is on loopback. A loopback
caller without the token must not be a web page of another origin.
"""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from p2pcast.ground.addresses import is_loopback
from p2pcast.ground.errors import RefusedError
from p2pcast.trust import bearer_tokens

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/?#\s]+))(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
READING = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


class HttpAccess:
    """``folder``: where the bearer token's file is, for the text of a 401. ``admits``: whether a caller without the
    bearer token may send this request. ``local_only``: commands whose answers hold secrets, available on loopback only.
    """

    def __init__(
        self,
        bearer: str,
        folder: Path = Path(),
        *,
        admits: Callable[[web.Request], bool] = lambda _: False,
        local_only: frozenset[str] = frozenset(),
    ) -> None:
        self.bearer = bearer
        self._file = folder / bearer_tokens.FILE
        self._admits = admits
        self._local_only = local_only

    def bears_token(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self.bearer}".encode())

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the refusal of a caller without the bearer token; None if the caller may send this request."""
        if request.path in OPEN_PATHS or self._admits(request):
            return None
        if not is_loopback(request.remote or ""):
            return _unauthorized("in http.token of the daemon's state folder")
        if not _same_origin(request):
            error = "web pages of other origins may not send requests to this daemon"
            return web.json_response({"error": error}, status=403)
        return None if request.method in READING else _unauthorized(f"in {self._file}")

    def check_local(self, command: str, request: web.Request) -> None:
        """Raise RefusedError if the command's answer must stay on this machine and the caller is on another one."""
        if command in self._local_only and not _is_local(request):
            raise RefusedError(
                "the answer holds a secret and HTTP is not encrypted: send this request from the daemon's machine"
            )


def _is_local(request: web.Request) -> bool:
    """Whether the caller is on this machine: at loopback, or at the address that it has connected to."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return is_loopback(request.remote or "") or (isinstance(own, tuple) and request.remote == own[0])


def _unauthorized(where: str) -> web.Response:
    error = f"a bearer token is needed: send the header Authorization: Bearer TOKEN; the TOKEN is {where}"
    return web.json_response({"error": error}, status=401, headers={"WWW-Authenticate": "Bearer"})


def _same_origin(request: web.Request) -> bool:
    """Whether no web page of another origin can have caused the request. Such a page can post blindly; then ``Origin``
    differs. With DNS rebinding, it can also read answers; then ``Host`` is the page's own name.
    """
    host = request.headers.get("Host", "")
    if (match := _HOST.fullmatch(host)) is None:
        return False
    name = match[1] or match[2]
    if not is_loopback(name) and name.lower() not in ("localhost", socket.gethostname().lower()):
        return False
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == host
