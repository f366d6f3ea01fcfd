"""Callers of the ledger: their roles, by certificate or bearer token, and the requests of each role."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, NamedTuple

from aiohttp import web

from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.ledger_api.api_route import Role
from p2pcast.trust import bearer_tokens
from p2pcast.trust.dial_permissions import Certified
from trainer_node.ledger.ledger_rows import BEARER, CapReachedError

WORKER_FILE = "worker.token"
"""File in the ledger's state folder: the bearer token of workers on this machine."""
_WORKER = b"worker"
MOST = 64
"""Connections of one certificate. A worker uses fewer than ten."""


class ForbiddenError(P2PCastError):
    """The caller is known, and its role may not send this request."""


class Caller(NamedTuple):
    """``name``: of the certificate's holder, or BEARER."""

    name: str
    role: str


def worker_bearer(trainer_bearer: str) -> str:
    return bearer_tokens.of_node(trainer_bearer, _WORKER)


class Callers:
    """``bearer``: of the trainer. ``certified``: the holder of a request's certificate, None for a request without
    one.
    """

    def __init__(self, bearer: str, certified: Callable[[web.Request], Certified | None]) -> None:
        self._bearers = {bearer: Caller(BEARER, "trainer"), worker_bearer(bearer): Caller(BEARER, "worker")}
        self._certified = certified

    def of(self, request: web.Request) -> Caller | None:
        """Raises ForbiddenError for a certificate that is refused, and RetryableError for one that has expired."""
        try:
            holder = self._certified(request)
        except RefusedError as error:
            raise ForbiddenError(str(error)) from None
        if holder is not None:
            return Caller(holder.node.hex(), holder.role)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        found = [
            who for bearer, who in self._bearers.items() if hmac.compare_digest(given, f"Bearer {bearer}".encode())
        ]
        return found[0] if found else None

    def admits(self, request: web.Request) -> bool:
        """Whether the request has a handler here to say more: ``of_role`` is asked again there."""
        if not request.path.startswith("/v1/"):
            return False
        try:
            return self.of(request) is not None
        except P2PCastError:
            return True

    def of_role(self, request: web.Request, role: Role) -> Caller:
        """Raises ForbiddenError."""
        caller = self.of(request)
        if caller is None or caller.role != role:
            known = "this caller has no role" if caller is None else f"this caller's role is {caller.role}"
            raise ForbiddenError(f"{request.method} {request.path} needs the role {role}, and {known}")
        return caller


class ManyConnectionsError(CapReachedError):
    """The connection of the refused request is closed."""


class CallerConnections:
    """Open connections of each certificate's holder: bounded, so that no worker takes the places of others."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: dict[str, set[Any]] = {}
        self._forget_at = most
        """Number of callers at which those without an open connection are forgotten."""

    def check(self, caller: Caller, request: web.Request) -> None:
        """Count the request's connection. Raises ManyConnectionsError. Holders of a bearer token cannot be told apart
        and are not counted.
        """
        if caller.name == BEARER:
            return
        mine = self._open.setdefault(caller.name, set())
        if request.protocol in mine:
            return
        mine -= {protocol for protocol in mine if protocol.transport is None}
        if len(mine) >= self._most:
            raise ManyConnectionsError(f"{self._most} connections with this certificate are open already")
        mine.add(request.protocol)
        if len(self._open) > self._forget_at:
            self._forget_closed()

    def _forget_closed(self) -> None:
        for name in [n for n, found in self._open.items() if all(protocol.transport is None for protocol in found)]:
            del self._open[name]
        self._forget_at = max(self._most, 2 * len(self._open))
