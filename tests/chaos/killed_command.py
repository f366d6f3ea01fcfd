"""``python tests/chaos/killed_command.py COMMAND…``: the p2pcast command, killed by SIGKILL at the disk step or mirror
request that ``P2PCAST_KILL_AT`` names (``N`` or ``N torn``).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from p2pcast.cli import main
from p2pcast.files import disk
from p2pcast.files.disk import DiskStep
from p2pcast.mirror import requests
from p2pcast.mirror.requests import ObjectRequest

KILL_AT = "P2PCAST_KILL_AT"

T = TypeVar("T")


class Killer:
    """Sends SIGKILL to this process at step number ``at`` (from 1). The kill comes before the step, or with ``torn``
    after half of the step, or before the answer to a mirror request.
    """

    def __init__(self, at: int, *, torn: bool) -> None:
        self._at = at
        self._torn = torn
        self._lock = threading.Lock()
        self._count = 0

    async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
        with self._lock:
            self._count += 1
            now = self._count == self._at
        if now:
            if self._torn:
                await do()
            path = f"{request.url.removeprefix('file://')}/{request.name}"
            self._die(f"{'the answer to ' if self._torn else ''}mirror {request.what} {path}")
        return await do()

    def _die(self, what: str) -> None:
        os.write(2, f"killed at step {self._at}: {what}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        with self._lock:
            self._count += 1
            if self._count == self._at:
                if self._torn and step.what == "write" and step.parts:
                    data = b"".join(bytes(part) for part in step.parts)
                    os.pwrite(step.fd, data[: len(data) // 2], step.at)
                self._die(f"{'half of ' if self._torn else ''}{step.what} {step.path}")
        return do()


if __name__ == "__main__":
    if at := os.environ.get(KILL_AT, "").split():
        killer = Killer(int(at[0]), torn="torn" in at[1:])
        with disk.watched(killer), requests.watched(killer):
            main()
    else:
        main()
