"""Starts that fail: which step raises, and what is left open afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import P2PCastError
from tests.support.until import until


class StepError(P2PCastError):
    """Raised by a step that a test replaces."""


def failing(*args: Any, **options: Any) -> None:
    raise StepError("this step fails")


def listening_at(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def _open(folder: Path) -> set[str]:
    """This process's sockets, open files below ``folder``, tasks and threads of a daemon."""
    found = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("p2pcast-")}
    found |= {f"task {task.get_name()}" for task in asyncio.all_tasks() - {asyncio.current_task()}}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(entry.path)
            if link.startswith((str(folder), "socket:")):
                found.add(link)
    return found


class NothingLeft:
    """At the end of the block, nothing is open that was not open at its begin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = _open(folder)

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        # Threads and sockets end a little later than the call that ends them.
        await until(lambda: _open(self._folder) - self._before, "all is closed", holds=lambda left: not left)
