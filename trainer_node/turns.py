"""When work beside live traffic may go on: at once while there is none, else for a small share of the time, a part at a time, so that it ends however busy a run is.

Why not by a low priority: a thread that waits for the interpreter's lock is given it when its time has come, and who gave it away waits until that thread really
runs; at the lowest priority on busy cores that is a long time, and all of the hub waits with it (docs/measurements.md, anchors).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

from p2pcast.tasks import spawn

LOOK_S = 0.01
SHARE = 0.05
"""Of the time, while there is live traffic."""
LEAST_WAIT_S, MOST_WAIT_S = 0.25, 1.0


class Turns:
    """``live``: whether there is live traffic; asked on the loop. ``clock``: monotonic, in seconds."""

    def __init__(self, live: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._free = threading.Event()
        self._began: float | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """One piece of work; ``take`` knows what goes on as long as the block runs."""
        self._began = None
        self._look()
        task = spawn(self._watch(), "turns")
        try:
            yield
        finally:
            task.cancel()
            self._free.set()

    def take(self, *, pressed: bool = False) -> None:
        """In the thread that works, before each part: returns when it may be done. ``pressed``: waiting would cost more than it saves."""
        if self._began is not None and not pressed:
            worked_s = self._clock() - self._began
            self._free.wait(min(MOST_WAIT_S, max(LEAST_WAIT_S, worked_s * (1 / SHARE - 1))))
        self._began = self._clock()

    def close(self) -> None:
        """Nobody waits any more."""
        self._live = lambda: False
        self._free.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        if self._live():
            self._free.clear()
        else:
            self._free.set()
