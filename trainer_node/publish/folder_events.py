"""Wakes a scanner of checkpoint folders when the kernel reports a change (inotify).

Guarantee: ``wait`` returns after its timeout at the latest, whatever the file system does. Network file systems report
no events, and the kernel may have no watches left, so periodic scans continue next to the events. Nothing is polled
here, writing data into a file causes no events, and paths are looked up in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from p2pcast.ground.backoff import Backoff
from p2pcast.process.background_tasks import spawn

logger = logging.getLogger("p2pcast.hub")

RETRY_S, RETRY_MOST_S = 5.0, 300.0
"""Shortest and longest delay before a folder that cannot be watched, or does not exist, is retried, in seconds."""

InThread = Callable[..., Awaitable[Any]]


class FolderEvents:
    """Wakes a scanner; obtained from ``folder_events``."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a change since the last call, or at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()


@contextlib.asynccontextmanager
async def folder_events(folder: Path, last_name: str) -> AsyncIterator[FolderEvents]:
    """Context manager that reports changes of ``folder`` itself (a folder in it appears, is renamed or removed), and of
    files named ``last_name`` in its folders.
    """
    events = FolderEvents()
    pool = ThreadPoolExecutor(1, thread_name_prefix="p2pcast-folder-events")
    in_thread = partial(asyncio.get_running_loop().run_in_executor, pool)
    watching = spawn(_watch_again(folder, last_name, events.notify, in_thread), "folder events")
    try:
        yield events
    finally:
        watching.cancel()
        pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.wait([watching])


async def _watch_again(folder: Path, last_name: str, notify: Callable[[], None], in_thread: InThread) -> None:
    delays, complained = Backoff(RETRY_S, RETRY_MOST_S, None), False
    while True:
        try:
            await _watch(folder, last_name, notify, in_thread)
            delays.reset()
        except FileNotFoundError:
            delays.reset()
        except (OSError, ImportError) as error:
            if not complained:
                logger.info("%s: the kernel reports no changes, scans go by the clock: %s", folder, error)
            complained = True
        await asyncio.sleep(delays.next_s())


async def _watch(folder: Path, last_name: str, notify: Callable[[], None], in_thread: InThread) -> None:
    """Watch until ``folder`` is removed or renamed. Raises OSError, and ImportError if the system has no inotify."""
    from asyncinotify import Inotify, Mask

    inside = Mask.CREATE | Mask.MOVED_TO | Mask.CLOSE_WRITE
    ends = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED

    with Inotify() as inotify:

        def add(path: Path) -> None:
            # The path may be a file, or a folder that is already gone.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                inotify.add_watch(path, inside | Mask.ONLYDIR)

        def add_all() -> Any:
            mask = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF
            root = inotify.add_watch(folder, mask | Mask.ONLYDIR)
            for path in folder.iterdir():
                add(path)
            return root

        root = await in_thread(add_all)
        notify()  # of changes before the watch
        async for event in inotify:
            if event.watch is not root:
                if event.watch is None or str(event.name) == last_name:
                    notify()
            elif event.mask & ends:
                notify()
                return
            else:
                if event.mask & (Mask.CREATE | Mask.MOVED_TO) and event.path is not None:
                    await in_thread(add, event.path)
                notify()
