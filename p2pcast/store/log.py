"""An artifact's log on disk: written by piece in any order, read by range."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from p2pcast.errors import IntegrityError
from p2pcast.store.files import explained

IOV_MAX = 512
"""Buffers in one pwritev: below every kernel's limit."""


class Log(Protocol):
    """Thread-safe. Offsets and sizes in bytes of the log."""

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put ``parts``, one after the other, at ``offset``. Raises LocalError (full disk …)."""

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        """``size`` bytes. Raises IntegrityError where they are not there; with ``short``, gives what there is."""

    def close(self) -> None: ...


class FileLog:
    """A log that lies in one file from ``start`` on."""

    def __init__(self, path: Path, start: int, *, create: bool = False) -> None:
        self.path = path
        self._start = start
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDONLY
        with explained("open", path):
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        with explained("write", self.path):
            at = self._start + offset
            for first in range(0, len(parts), IOV_MAX):
                some = parts[first : first + IOV_MAX]
                size = sum(len(p) for p in some)
                done = os.pwritev(self.fd, some, at)
                if done < size:
                    rest = memoryview(b"".join(some))[done:]
                    while rest:
                        more = os.pwrite(self.fd, rest, at + done)
                        rest, done = rest[more:], done + more
                at += size

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        with explained("read", self.path):
            data = os.pread(self.fd, size, self._start + offset)
            while len(data) < size and (more := os.pread(self.fd, size - len(data), self._start + offset + len(data))):
                data += more
        if len(data) < size and not short:
            raise IntegrityError(f"{self.path}: {size} bytes at {offset} of the log are not there: the file was cut short")
        return data

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
