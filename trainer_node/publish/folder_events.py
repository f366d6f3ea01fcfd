"""Wakes a scanner of checkpoint folders when the file system reports a change.

Promise: ``wait`` returns at the latest after its timeout, whatever the file system does. Network file systems report no
events, and a kernel may have no watches left, so scans by the clock go on beside the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from watchfiles import Change, awatch

from p2pcast.daemon.background_tasks import spawn

logger = logging.getLogger("p2pcast.hub")

STEP_MS = 5
"""Events are reported after so many milliseconds without another one."""
DEBOUNCE_MS = 50
"""Events are reported after so many milliseconds at the latest, while a trainer writes without pause."""
RETRY_S = 5.0
"""Seconds until a folder that cannot be watched, or does not exist, is tried again."""


class FolderEvents:
    """Made by ``folder_events``."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Return after a change since the last call, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()


@contextlib.asynccontextmanager
async def folder_events(folder: Path, last_name: str) -> AsyncIterator[FolderEvents]:
    """Events of ``folder`` itself (a folder in it appears, is renamed or removed), and of files called ``last_name`` in
    its folders.
    """
    events = FolderEvents()
    watching = spawn(_watch(folder, last_name, events.notify), "folder events")
    try:
        yield events
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def _watch(folder: Path, last_name: str, notify: Callable[[], None]) -> None:
    complained = False
    while True:
        try:
            root = _existing(folder)
            async for _ in awatch(
                root,
                watch_filter=partial(_is_wanted, root, last_name),
                step=STEP_MS,
                debounce=DEBOUNCE_MS,
                force_polling=False,
                ignore_permission_denied=True,
            ):
                notify()
                _existing(folder)
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError) as error:
            if not complained:
                logger.info("%s: the file system reports no changes, so the folder is scanned by the clock: %s",
                            folder, error)  # fmt: skip
            complained = True
        await asyncio.sleep(RETRY_S)


def _existing(folder: Path) -> Path:
    """The folder without links. Raises FileNotFoundError."""
    return folder.resolve(strict=True)


def _is_wanted(root: Path, last_name: str, _: Change, name: str) -> bool:
    path = Path(name)
    return path.parent == root or path.name == last_name
