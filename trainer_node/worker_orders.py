"""An operator's orders at the hub about the ledger's workers. The ledger receives them with the hub's next responses.

Guarantees: an order lapses by itself. Until then it is repeated with each response, so neither a lost response nor a
restart of the ledger loses it. A restarted hub has forgotten its orders, but the ledger keeps those that it has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from p2pcast.daemon.command_body import check_keys
from p2pcast.daemon.http_server import Document
from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ledger_api.api_route import MAX_DRAIN_S, MAX_NAME

MAX_ORDERS: Final = 64
ADMIT_S: Final = 10.0
"""How long an order to give leases again is repeated, in seconds."""


class WorkerOrders:
    """``clock``: seconds from any origin. ``heard``: whether a ledger is currently sending summaries."""

    def __init__(self, heard: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, heard
        self._orders: dict[str, tuple[bool, float]] = {}
        """Worker → whether it gets no leases, and until when."""

    async def command(self, body: Document) -> Document:
        """POST /workers/drain: ``{"name": NAME, "for_s": SECONDS}``; 0 seconds gives leases again. Raises UsageError or
        RefusedError.
        """
        check_keys(body, "name", "for_s")
        name, for_s = body.get("name"), body.get("for_s")
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
            raise UsageError(f'name the worker: {{"name": TEXT}} of at most {MAX_NAME} characters')
        if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not math.isfinite(for_s):
            raise UsageError('say for how long: {"for_s": seconds}, 0 for leases again')
        if not 0 <= for_s <= MAX_DRAIN_S:
            raise UsageError(f"for_s is 0 to {MAX_DRAIN_S:g} seconds, not {for_s:g}")
        if not self._heard():
            raise RefusedError("no ledger tells this hub of its rollouts: give it --hub-http and --hub-bearer-file")
        now_s = self._clock()
        self._forget(now_s)
        if name not in self._orders and len(self._orders) >= MAX_ORDERS:
            raise RefusedError(f"orders for {MAX_ORDERS} workers are in force already")
        self._orders[name] = (True, now_s + for_s) if for_s > 0 else (False, now_s + ADMIT_S)
        return {"name": name, "for_s": for_s}

    def pending(self) -> dict[str, float]:
        """For the ledger: how many seconds each worker gets no leases, by name; 0 to give leases again."""
        now_s = self._clock()
        self._forget(now_s)
        return {name: round(until_s - now_s, 3) if drains else 0.0 for name, (drains, until_s) in self._orders.items()}

    def _forget(self, now_s: float) -> None:
        self._orders = {name: order for name, order in self._orders.items() if order[1] > now_s}
