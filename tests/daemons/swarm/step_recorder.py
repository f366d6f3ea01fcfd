"""A hook for ``p2pcast.files.disk`` and ``p2pcast.mirror.requests`` that records every step."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from disk_image import RecordedStep

from p2pcast.files.disk import DiskStep
from p2pcast.mirror.requests import ObjectRequest

T = TypeVar("T")


class Recorder:
    """Records all steps below ``root`` in order (``done``), and notes of promises made meanwhile as (number of steps
    before the note, note).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[RecordedStep] = []
        self.notes: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        """Inode → file number; the kernel reuses inodes."""
        self._made = 0

    def note(self, what: str) -> None:
        with self._lock:
            self.notes.append((len(self.done), what))

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        with self._lock:
            there = step.what == "create" and step.path.exists()
            result = do()
            if not step.path.is_relative_to(self.root) or (step.what == "exchange" and not result):
                return result
            file, data, at = -1, b"", step.at
            if step.what == "create":
                assert isinstance(result, int)
                inode = os.fstat(result).st_ino
                if not there or inode not in self._files:
                    self._made += 1
                    self._files[inode] = self._made
                file = self._files[inode]
            elif step.fd >= 0:
                file = self._files[os.fstat(step.fd).st_ino]
            if step.what == "store":
                data = step.path.read_bytes()
            elif step.parts:
                data = b"".join(bytes(part) for part in step.parts)
            to = (
                ""
                if step.to is None
                else str(step.to)
                if step.what == "symlink"
                else str(step.to.relative_to(self.root))
            )
            self.done.append(
                RecordedStep(step.what, str(step.path.relative_to(self.root)), to, file, at, step.size, data)
            )
            return result

    async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
        """Record a request to a mirror that is a folder below ``root``. A request counts from its sending, since its
        answer may be lost.
        """
        path = Path(request.url.removeprefix("file://")) / request.name
        if request.what in ("write", "remove") and path.is_relative_to(self.root):
            with self._lock:
                what = "put" if request.what == "write" else "remove"
                self.done.append(RecordedStep(what, str(path.relative_to(self.root)), data=bytes(request.data)))
        return await do()
