"""Waiting for child processes: until a condition holds, or until a daemon answers. An error names the missing process,
with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from netem.fleet.processes import ChildProcess, FleetError, Processes, describe_exit

POLL_S = 0.1
READY_S = 600.0
"""Time limit of a daemon's start."""
HTTP_S = 10.0

T = TypeVar("T")


class FleetWatch:
    """``state``: a daemon's name → its state folder. ``between``: called between two checks, to update a display."""

    def __init__(
        self,
        processes: Processes,
        state: Callable[[str], Path],
        http: aiohttp.ClientSession,
        between: Callable[[], None],
    ) -> None:
        self._processes, self._state, self._http, self._between = processes, state, http, between

    async def until(
        self,
        what: str,
        child: ChildProcess,
        limit_s: float,
        done: Callable[[], bool],
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Poll until ``done``. Raises FleetError if a child ends unexpectedly or after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while True:
            if poll is not None:
                poll()
            if done():
                return
            self._processes.check()
            if time.monotonic() > deadline:
                raise child.failure(f"no {what} within {limit_s:.0f} s")
            self._between()
            await asyncio.sleep(POLL_S / 2)

    async def end(self, what: str, child: ChildProcess, limit_s: float) -> None:
        """Return at the end of a child that ends by itself. Raises FleetError for another exit code than 0."""
        child.expected = True
        await self.until(what, child, limit_s, lambda: not child.alive)
        if child.code:
            raise child.failure(f"{what} ended with {describe_exit(child.code)}")

    async def until_answers(self, what: str, child: ChildProcess, limit_s: float, url: str) -> None:
        """Return when ``url`` answers with status 200. Raises FleetError."""
        deadline = time.monotonic() + limit_s
        while True:
            self._processes.check()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(url) as response:
                    if response.status == 200:
                        return
            if time.monotonic() > deadline:
                raise child.failure(f"{what} did not answer {url} within {limit_s:.0f} s")
            self._between()
            await asyncio.sleep(POLL_S)

    async def daemon(self, name: str, child: ChildProcess, *, ready: bool = True) -> str:
        """The URL of a daemon, once it serves (and is ready)."""
        path, found = self._state(name) / "daemon.json", ""

        def poll() -> None:
            nonlocal found
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = str(json.loads(path.read_text())["http"])

        await self.until(f"address of {name}", child, READY_S, lambda: bool(found), poll)
        if ready:
            await self.until_answers(name, child, READY_S, found + "/readyz")
        return found

    async def get(self, url: str) -> dict[str, Any]:
        """The JSON document at ``url``. Raises FleetError."""
        try:
            async with self._http.get(url) as response:
                document: dict[str, Any] = await response.json()
                return document
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._processes.check()
            raise FleetError(f"{url}: {error or 'no answer'}") from None


async def unwrapped(work: Awaitable[T]) -> T:
    """Run ``work`` and raise the first error out of task groups. SIGTERM raises KeyboardInterrupt."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # asyncio itself handles SIGINT
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
