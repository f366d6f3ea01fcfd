"""Runs a loop of the worker beside a test, until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

END_S = 600.0


async def run_until(loop: Coroutine[Any, Any, None], condition: Callable[[], bool]) -> None:
    """The loop is cancelled afterwards; it must not end before."""
    running = asyncio.create_task(loop)
    try:
        async with asyncio.timeout(END_S):
            while not condition():
                assert not running.done()
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.wait([running])
