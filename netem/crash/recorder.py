"""Watchers of ``p2pcast.store.disk`` and ``p2pcast.mirror.requests``: one that records every step, and one that kills the process at a step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from netem.crash.image import Done
from p2pcast.mirror.requests import Request
from p2pcast.store.disk import Step

T = TypeVar("T")


class Recorder:
    """All that was done below ``root``, in order (``done``), and notes of what was promised meanwhile: (steps done before it, note)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[Done] = []
        self.notes: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        """Inode → number of the file: inodes are used again."""
        self._made = 0

    def note(self, what: str) -> None:
        with self._lock:
            self.notes.append((len(self.done), what))

    def step(self, step: Step, do: Callable[[], T]) -> T:
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
            to = "" if step.to is None else str(step.to) if step.what == "symlink" else str(step.to.relative_to(self.root))
            self.done.append(Done(step.what, str(step.path.relative_to(self.root)), to, file, at, step.size, data))
            return result

    async def request(self, request: Request, do: Callable[[], Awaitable[T]]) -> T:
        """Of a mirror that is a folder below ``root``. What was asked of it counts from the asking: an answer may never be heard."""
        path = Path(request.url.removeprefix("file://")) / request.name
        if request.what in ("write", "remove") and path.is_relative_to(self.root):
            with self._lock:
                what = "put" if request.what == "write" else "remove"
                self.done.append(Done(what, str(path.relative_to(self.root)), data=bytes(request.data)))
        return await do()


class Killer:
    """SIGKILL for this process at its step number ``at`` (from 1): before it, or (``torn``) after half of it, or of a request to a mirror before its answer is heard."""

    def __init__(self, at: int, *, torn: bool) -> None:
        self._at = at
        self._torn = torn
        self._lock = threading.Lock()
        self._count = 0

    async def request(self, request: Request, do: Callable[[], Awaitable[T]]) -> T:
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

    def step(self, step: Step, do: Callable[[], T]) -> T:
        with self._lock:
            self._count += 1
            if self._count == self._at:
                if self._torn and step.what == "write" and step.parts:
                    data = b"".join(bytes(part) for part in step.parts)
                    os.pwrite(step.fd, data[: len(data) // 2], step.at)
                self._die(f"{'half of ' if self._torn else ''}{step.what} {step.path}")
        return do()
