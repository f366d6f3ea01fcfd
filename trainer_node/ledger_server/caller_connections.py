"""Open connections of each certificate's holder: bounded, so that no worker takes the places of others."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from trainer_node.ledger.ledger_rows import BEARER, FullError
from trainer_node.ledger_server.callers import Caller

MOST = 64
"""Connections of one certificate. A worker uses fewer than ten."""


class ManyConnectionsError(FullError):
    """The connection of the refused request is closed."""


class CallerConnections:
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
