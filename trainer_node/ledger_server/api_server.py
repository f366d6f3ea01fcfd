"""The way of every request to the ledger's HTTP API: the caller's role, a bounded body, a record, and one answer.

Guarantees: nothing is received before the caller's role is known, and nothing is done unless it still has that role
after its body came. A body is bounded before it is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from aiohttp import web

from p2pcast.daemon.http_connections import hold
from p2pcast.daemon.request_body import BodyTooLargeError, read_body
from p2pcast.ground import limits
from p2pcast.ground.errors import (
    IntegrityError,
    LocalError,
    P2PCastError,
    RefusedError,
    RemoteError,
    RetryableError,
    UsageError,
)
from p2pcast.ledger_api.api_route import ApiRecord, ApiRoute, Role
from p2pcast.process.shortages import shortage
from p2pcast.rollouts.record_form import RolloutRecord
from trainer_node.ledger.ledger_rows import BEARER, CapReachedError, UnknownIdError
from trainer_node.ledger_server.body_budget import BODY_BYTES, BodyBudget
from trainer_node.ledger_server.callers import CallerConnections, Callers, ForbiddenError, ManyConnectionsError

T = TypeVar("T")
Q = TypeVar("Q", bound=ApiRecord)
A = TypeVar("A", bound=ApiRecord)
R = TypeVar("R", bound=RolloutRecord)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON_BYTES: Final = 512 * limits.KIB
"""Largest JSON body: room for the leases of MAX_SLOTS plays in one heartbeat."""
BODY_S: Final = 120.0
"""Time limit for a body, in seconds: 64 MiB at 5 Mbit/s."""
STATUSES: Final[dict[type[P2PCastError], int]] = {
    UsageError: 400,
    BodyTooLargeError: 413,
    ForbiddenError: 403,
    UnknownIdError: 404,
    RefusedError: 409,
    CapReachedError: 429,
    RemoteError: 400,
    IntegrityError: 500,
    LocalError: 503,
    RetryableError: 503,
}
CALLER: Final = ContextVar("caller", default=BEARER)
"""Name of the caller of the request that this context answers."""
REQUEST: Final[ContextVar[web.Request]] = ContextVar("request")
"""The request that this context answers."""


class ApiServer:
    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._bodies, self._unpacked = BodyBudget(), BodyBudget()
        self._connections = CallerConnections()

    def on(self, route: ApiRoute[Q, A], handler: Callable[[Q], Awaitable[A | web.StreamResponse]]) -> web.RouteDef:
        """``handler``: gives the answer's record, or has sent the answer itself."""

        async def answer(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, JSON_BYTES, BODY_S)
            self.check_role(route.role)
            found = await handler(route.read_request(body))
            return found if isinstance(found, web.StreamResponse) else _response(route, found)

        return web.post(route.path, self.answering(answer, route.role))

    def on_records(
        self, route: ApiRoute[Q, A], field: str, kind: type[R], handler: Callable[[Q, list[R]], Awaitable[A]]
    ) -> web.RouteDef:
        """``field``: of the request, holds the bytes of records. Body and unpacked records wait for room."""

        async def answer(request: web.Request) -> web.StreamResponse:
            size, caller = request.content_length, CALLER.get()
            if size is None:
                raise UsageError("the request has no Content-Length")
            async with self._bodies.room(caller, size):
                asked = route.read_request(await read_body(request, BODY_BYTES, BODY_S))
                rows = getattr(asked, field)
                async with self._unpacked.room(caller, sum(_each(kind.unpacked_bytes, rows, field))):
                    self.check_role(route.role)
                    return _response(route, await handler(asked, _each(kind.from_bytes, rows, field)))

        return web.post(route.path, self.answering(answer, route.role))

    def check_role(self, role: Role) -> None:
        """Whether the caller of this context's request still has its role. Raises ForbiddenError, RetryableError."""
        self._callers.of_role(REQUEST.get(), role)

    def reading(self, name: str, document: Callable[[], dict[str, Any]]) -> web.RouteDef:
        """``GET /v1/NAME``, for trainers."""

        async def read(request: web.Request) -> web.StreamResponse:
            return web.json_response(document())

        return web.get(f"/v1/{name}", self.answering(read, "trainer"))

    def answering(self, handler: Handler, role: Role) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                caller = self._callers.of_role(request, role)
                self._connections.check(caller, request)
                hold(request, proven=True)
                CALLER.set(caller.name)
                REQUEST.set(request)
                return await handler(request)
            except Exception as found:  # noqa: BLE001 - bugs are raised again
                error = _said(found)
                status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)
                response = web.json_response({"error": str(error)}, status=status)
                if isinstance(error, ManyConnectionsError):
                    response.force_close()
                return response

        return answer


def _response(route: ApiRoute[Any, A], found: A) -> web.Response:
    return web.Response(body=route.answer(found), content_type=route.answer_type)


def _each(read: Callable[[bytes], T], rows: Sequence[bytes], name: str) -> list[T]:
    """Raises RemoteError with the place of the row that is wrong."""
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(read(row))
        except RemoteError as error:
            raise RemoteError(f"{name}[{number}]: {error}") from None
    return found


def _said(error: Exception) -> P2PCastError:
    """The error that the caller of a request gets. Raises a bug."""
    if isinstance(error, P2PCastError):
        return error
    if (short := shortage(error)) is None:
        raise error
    return LocalError(f"the ledger's machine: {short}")
