"""Orders that a worker gets no leases for a while: from the fleet's operator, and from the run's page through the hub.

Guarantee: an order that changes something is an event, and waiting requests are tried again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.process.events import Events

logger = logging.getLogger("p2pcast.ledger")


class WorkerDrains:
    """``drain``: the ledger's transition. ``changed``: called when a worker may get leases again."""

    def __init__(
        self,
        drain: Callable[[str, float], Awaitable[tuple[int, bool]]],
        events: Events,
        changed: Callable[[], object],
    ) -> None:
        self._drain, self._events, self._changed = drain, events, changed

    async def order(self, name: str, for_s: float) -> int:
        """As of ``Ledger.drain``. Returns how many leases the worker still holds."""
        leases, changed = await self._drain(name, for_s)
        if changed and for_s > 0:
            self._events.emit("worker_drained", name=name, leases=leases, for_s=for_s)
        elif changed:
            self._events.emit("worker_admitted", name=name)
            self._changed()
        return leases

    async def take(self, orders: Any) -> None:
        """Orders in the hub's answer to a summary: seconds by name. The hub repeats them: an order that cannot be
        followed now is not lost. Raises RetryableError and LocalError of the database.
        """
        if not isinstance(orders, Mapping):
            return
        for name, for_s in orders.items():
            number = isinstance(for_s, int | float) and not isinstance(for_s, bool) and math.isfinite(for_s)
            if isinstance(name, str) and number:
                try:
                    await self.order(name, float(for_s))
                except (RefusedError, UsageError) as error:
                    logger.warning("the hub's order about worker %s is not followed: %s", name[:100], error)
