"""An artifact's log on disk: written by piece in any order, read by range."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from p2pcast.errors import IntegrityError, LocalError
from p2pcast.store import disk
from p2pcast.store.files import explained
from p2pcast.store.journal import Journal, Record


class Log(Protocol):
    """Thread-safe. Offsets and sizes in bytes of the log."""

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put ``parts``, one after the other, at ``offset``. Raises LocalError (full disk …)."""

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        """``size`` bytes. Raises IntegrityError where they are not there; with ``short``, gives what there is."""

    def note(self, records: Sequence[Record]) -> None:
        """Signed records of the artifact, for one who goes on with it after a crash. Raises LocalError."""

    def close(self) -> None: ...


class FileLog:
    """A log that lies in one file from ``start`` on. The file is opened, or made, by whoever first uses it: that may take its time, and is not for an event loop.

    One that is being written stays open; a finished one only while somebody reads it, so that a store of many versions takes no descriptors.
    """

    def __init__(
        self,
        path: Path,
        start: int,
        *,
        head: bytes | None = None,
        allocate_bytes: int = 0,
        journal: Journal | None = None,
        resumed: bool = False,
    ) -> None:
        """With ``head`` the file is to be written and to begin with these bytes; room for ``allocate_bytes`` of the log is then taken at once.

        It does not exist yet, but when it is ``resumed``.
        """
        self.path = path
        self.journal = journal
        self._resumed = resumed
        self._start = start
        self._head = head
        self._allocate_bytes = allocate_bytes
        self._fd = -1
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The file descriptor, which stays ours while the block runs: a number that was closed may be another file's a moment later. Raises LocalError."""
        with self._lock:
            if self._closing:
                raise LocalError(f"{self.path} was closed while it was still needed")
            if self._fd < 0:
                self._open()
            self._users += 1
        try:
            yield self._fd
        finally:
            self._release()

    def _open(self) -> None:
        if self._head is None:
            try:
                with explained("open", self.path):
                    self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except LocalError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    # Not ours to mend by room or rights: as good as damaged, and had anew like that.
                    raise IntegrityError(f"{self.path} is gone from the store") from None
                raise
            return
        with explained("create", self.path):
            disk.make_folder(self.path.parent)
            fd = disk.create(self.path, os.O_RDWR | (0 if self._resumed else os.O_EXCL))
            try:
                if self._head:
                    disk.write_at(fd, self.path, [self._head], 0)
                if self._allocate_bytes:
                    disk.allocate(fd, self.path, self._start, self._allocate_bytes)
            except BaseException:
                os.close(fd)
                disk.unlink(self.path, missing_ok=True)
                raise
            self._fd = fd

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            self._let_go()

    def _let_go(self) -> None:
        if not self._users and self._fd >= 0 and (self._closing or self._head is None):
            os.close(self._fd)
            self._fd = -1

    def moved(self, path: Path) -> None:
        """It is finished, and its file has another name now."""
        with self._lock:
            self.path, self._head = path, None
            self._let_go()

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        with self.descriptor() as fd, explained("write", self.path):
            disk.write_at(fd, self.path, parts, self._start + offset)

    def note(self, records: Sequence[Record]) -> None:
        if self.journal is not None:
            self.journal.add(records)

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        with self.descriptor() as fd, explained("read", self.path):
            data = os.pread(fd, size, self._start + offset)
            while len(data) < size and (more := os.pread(fd, size - len(data), self._start + offset + len(data))):
                data += more
        if len(data) < size and not short:
            raise IntegrityError(f"{self.path}: {size} bytes at {offset} of the log are not there: the file was cut short")
        return data

    def close(self) -> None:
        """Never waits: a read or write that is under way in another thread ends first."""
        if self.journal is not None:
            self.journal.close()
        with self._lock:
            self._closing = True
            self._let_go()
