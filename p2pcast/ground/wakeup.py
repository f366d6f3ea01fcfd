"""An event that wakes every waiting task at each ring."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Check the condition, then wait. No ring is lost as long as there is no await between the check and the wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a ring; returns False if ``timeout_s`` passed without one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
