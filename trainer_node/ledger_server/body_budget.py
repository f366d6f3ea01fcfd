"""Memory for the bodies of requests that are being received: bounded over all callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from p2pcast import limits
from p2pcast.errors import UsageError
from p2pcast.wakeup import Wakeup
from trainer_node.ledger.ledger_rows import FullError

BUDGET_BYTES = 512 * limits.MIB
"""All bodies together."""
BODY_BYTES = 64 * limits.MIB
"""One body: 32 results of 2 MiB, or fewer larger ones."""
WAIT_S = 20.0


class TooLargeError(UsageError):
    """A body that the ledger never takes."""


class BodyBudget:
    """A body waits until there is room for it: the kernel then slows its sender down."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._free = budget_bytes
        self._freed = Wakeup()

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Raises TooLargeError, and FullError without room within WAIT_S."""
        if size > BODY_BYTES:
            raise TooLargeError(f"the body has {size} bytes, and {BODY_BYTES} are allowed: send fewer records at once")
        try:
            async with asyncio.timeout(WAIT_S):
                while self._free < size:
                    await self._freed.wait()
        except TimeoutError:
            raise FullError(f"too many bodies arrive at once: none had room for {WAIT_S:g} s") from None
        self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._freed.notify()
