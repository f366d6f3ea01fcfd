"""Runs a loop of the worker beside a test, until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.until import until


async def run_until(loop: Coroutine[Any, Any, None], condition: Callable[[], bool]) -> None:
    """The loop is cancelled afterwards; it must not end before."""
    running = asyncio.create_task(loop)
    try:
        await until(lambda: condition() or running.done())
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
