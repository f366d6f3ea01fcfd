"""Wakes everybody who waits, as often as it rings."""

from __future__ import annotations

import asyncio


class Bell:
    """Look first, then wait: what rings between the two is heard, as long as nothing is awaited in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """False when ``timeout_s`` passed without a ring."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
