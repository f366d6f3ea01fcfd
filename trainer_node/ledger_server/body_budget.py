"""Memory for what requests bring: bounded over all callers, and for each caller.

Guarantee: a caller that sends slowly, or much, delays no other caller's requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from p2pcast.daemon.request_body import BodyTooLargeError
from p2pcast.ground import limits
from p2pcast.ground.wakeup import Wakeup
from trainer_node.ledger.ledger_rows import CapReachedError

BUDGET_BYTES = 512 * limits.MIB
"""All callers together."""
CALLER_BYTES = 128 * limits.MIB
"""One caller: two of the largest requests."""
BODY_BYTES = 64 * limits.MIB
"""One request: 32 results of 2 MiB, or fewer larger ones."""
WAIT_S = 20.0


class BodyBudget:
    """A request waits until there is room for it: the kernel then slows its sender down."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES, caller_bytes: int = CALLER_BYTES) -> None:
        self._free = budget_bytes
        self._caller_bytes = caller_bytes
        self._held: Counter[str] = Counter()
        self._freed = Wakeup()

    @contextlib.asynccontextmanager
    async def room(self, caller: str, size: int) -> AsyncIterator[None]:
        """Raises BodyTooLargeError, and CapReachedError without room within WAIT_S."""
        if size > BODY_BYTES:
            raise BodyTooLargeError(
                f"a request of {size} bytes, and {BODY_BYTES} are allowed: send fewer records at once"
            )
        try:
            async with asyncio.timeout(WAIT_S):
                while not self._fits(caller, size):
                    await self._freed.wait()
        except TimeoutError:
            raise CapReachedError(f"too many requests arrive at once: none had room for {WAIT_S:g} s") from None
        self._free -= size
        self._held[caller] += size
        try:
            yield
        finally:
            self._free += size
            self._held[caller] -= size
            if not self._held[caller]:
                del self._held[caller]
            self._freed.notify()

    def _fits(self, caller: str, size: int) -> bool:
        return size <= self._free and self._held[caller] + size <= self._caller_bytes
