"""Decides when background work may continue: at once while there is no live traffic, and otherwise for a small share of
the time, one part at a time. So the work finishes however busy a run is.

A low thread priority would not help: the GIL is handed to a waiting thread, and all others wait until that thread has
actually run. At the lowest priority on busy cores that takes long (docs/design/decisions/anchors.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable

from p2pcast.process.background_tasks import spawn
from p2pcast.relay.child import Child
from p2pcast.relay.holding import Holding

CHECK_S = 0.01
"""Interval between two checks for live traffic, in seconds."""
SHARE = 0.05
"""Share of the time that background work may use during live traffic."""
LEAST_WAIT_S, MOST_WAIT_S = 0.25, 1.0


class BackgroundThrottle:
    """``live``: whether there is live traffic; called on the event loop. ``clock``: monotonic, in seconds."""

    def __init__(self, live: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._free = threading.Event()
        self._began: float | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Context manager around one piece of work, during which ``take`` waits for live traffic."""
        self._began = None
        self._update()
        task = spawn(self._watch(), "background throttle")
        try:
            yield
        finally:
            task.cancel()
            self._free.set()

    def take(self, *, pressed: bool = False) -> None:
        """Wait until the next part may be done; called in the working thread before each part. ``pressed``: waiting
        would cost more than it saves.
        """
        if self._began is not None and not pressed:
            worked_s = self._clock() - self._began
            self._free.wait(min(MOST_WAIT_S, max(LEAST_WAIT_S, worked_s * (1 / SHARE - 1))))
        self._began = self._clock()

    def close(self) -> None:
        """Let all calls of ``take`` return at once from now on."""
        self._live = lambda: False
        self._free.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._update()

    def _update(self) -> None:
        if self._live():
            self._free.clear()
        else:
            self._free.set()


def live_traffic(holdings: Iterable[Holding], children: Iterable[Child]) -> bool:
    """Whether the hub is making or sending a version: an artifact is incomplete, or a child waits for pieces."""
    return any(h.incomplete for h in holdings) or any(child.schedules.waiting for child in children)
