"""Workers that get no leases for a while: the fleet's operator stops them once their leases have ended. Pure; time is
the ledger's.

Guarantees: an order lapses by itself, so that an operator that died leaves no worker idle for ever. A name without a
worker may be drained: a worker that is still starting then gets no lease.
"""

from __future__ import annotations

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ledger_api.api_route import MAX_DRAIN_S

MAX_ORDERS = 16384
"""As many as workers may be registered."""


class DrainedWorkers:
    """Drain orders, kept only in memory. After the ledger restarts, the fleet's operator sends them again."""

    def __init__(self, most: int = MAX_ORDERS) -> None:
        self._until_s: dict[str, float] = {}
        self._most = most

    def order(self, name: str, now_s: float, for_s: float) -> bool:
        """Stop leasing to the worker for ``for_s`` seconds; 0 resumes leasing. Returns whether the state changed.
        Raises UsageError, RefusedError.
        """
        if not 0 <= for_s <= MAX_DRAIN_S:
            raise UsageError(f"a worker is drained for 0 to {MAX_DRAIN_S:g} s, not {for_s:g} s")
        was = self.left_s(name, now_s) > 0
        if for_s == 0:
            self._until_s.pop(name, None)
            return was
        if name not in self._until_s and len(self._until_s) >= self._most:
            self._until_s = {one: until_s for one, until_s in self._until_s.items() if until_s > now_s}
            if len(self._until_s) >= self._most:
                raise RefusedError(f"{self._most} workers are drained already")
        self._until_s[name] = now_s + for_s
        return not was

    def left_s(self, name: str, now_s: float) -> float:
        """Return the seconds until the worker gets leases again, or 0 if it gets them now."""
        return max(0.0, self._until_s.get(name, 0.0) - now_s)
