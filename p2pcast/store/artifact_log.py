"""An artifact's log on disk. Pieces are written in any order; any range can be read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.store.artifact_journal import ArtifactJournal, Record


class ArtifactLog(Protocol):
    """An artifact's log. Thread-safe. Offsets and sizes are in bytes of the log."""

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write ``parts``, one after the other, at ``offset``. Raises LocalError (full disk …)."""

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        """Read ``size`` bytes. Raises IntegrityError if some are missing; with ``short``, returns those that exist."""

    def note(self, records: Sequence[Record]) -> None:
        """Store signed records of the artifact, so that a later process can resume it. Raises LocalError."""

    def close(self) -> None: ...


class FileLog:
    """A log in one file, from ``start`` on. The first use opens or creates the file, which may block: do not use it on
    an event loop.

    A log that is being written stays open. A finished one is open only during reads, so that a store of many versions
    needs few file descriptors.
    """

    def __init__(
        self,
        path: Path,
        start: int,
        *,
        head: bytes | None = None,
        allocate_bytes: int = 0,
        journal: ArtifactJournal | None = None,
        resumed: bool = False,
    ) -> None:
        """``head``: if given, the file is written, and starts with these bytes; ``allocate_bytes`` of the log are
        allocated at once.

        The file must not exist, unless it is ``resumed``.
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
        """Context manager that keeps the file descriptor open; a closed one's number may be reused for a different
        file. Raises LocalError.
        """
        with self._lock:
            if self._closing:
                raise LocalError(f"{self.path} was closed while it was in use")
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
                    # Treat a missing file as damaged, so that it is fetched again.
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
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._users and self._fd >= 0 and (self._closing or self._head is None):
            os.close(self._fd)
            self._fd = -1

    def renamed(self, path: Path) -> None:
        """Record the finished file's new name."""
        with self._lock:
            self.path, self._head = path, None
            self._close_if_unused()

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
            raise IntegrityError(
                f"{self.path}: {size} bytes at {offset} of the log are missing: the file was cut short"
            )
        return data

    def close(self) -> None:
        """Close the log without blocking. The file stays open until other threads' reads and writes have finished."""
        if self.journal is not None:
            self.journal.close()
        with self._lock:
            self._closing = True
            self._close_if_unused()
