"""A small append-only file of JSON records, one per line, for facts that a daemon must never lose and that are too many
to rewrite each time.

Guarantees: a record is durable when ``append`` returns, at the cost of one write and one fsync, whatever the file's
length. After a crash, the file contains every record appended before; a torn last line is removed on the next start.
Damage anywhere else raises an error that names the line, because skipping a record would undo it (an eviction, a
version's number).

    each line: CRC-32 of the JSON text in 8 hexadecimal digits, a space, the JSON text of one object, a newline
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError

Record = dict[str, Any]

MAX_FILE_BYTES = 256 * limits.MIB
"""Limit of a file read whole at the start; owners call ``rewrite`` long before."""
MODE = 0o600


class AppendLog:
    """``records``: the file's records when it was opened, oldest first, then the appended ones. Thread-safe."""

    def __init__(self, path: Path, *, skip_damaged: bool = False) -> None:
        """Open the file. If it is missing, the first record creates it.

        ``skip_damaged``: skip damaged lines and count them in ``damaged``, for callers that can lose a record. Raises
        LocalError if the file is unreadable, or damaged before its last line.
        """
        self.path = path
        self.records: list[Record] = []
        self.damaged = 0
        """Number of unreadable lines before the last, which were skipped."""
        self._skip_damaged = skip_damaged
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._named = path.exists()
        """Whether the file's name is durable in its folder."""
        if self._named:
            self._read()

    def append(self, *records: Mapping[str, Any], sync: bool = True) -> None:
        """Append records, durable on return. After a crash during the call, the file may contain the first few of them.

        Without ``sync``, they survive the end of this process, but not a machine crash. Raises LocalError, in which
        case none of them is in ``records``.
        """
        data = b"".join(map(_line, records))
        with self._lock:
            with explained("write", self.path):
                if self._fd < 0:
                    self._fd = disk.create(self.path, os.O_WRONLY | os.O_NOFOLLOW, MODE)
                try:
                    disk.write_at(self._fd, self.path, [data], self._size)
                    if sync:
                        disk.sync(self._fd, self.path)
                    if not self._named:
                        disk.sync_folder(self.path.parent)
                except OSError:
                    # Cut off a partial line, so that the next record starts a new line.
                    disk.resize(self._fd, self.path, self._size)
                    raise
            self._named = True
            self._size += len(data)
            self.records.extend(dict(r) for r in records)

    def rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole file with ``records`` atomically. If it raises LocalError, the file is unchanged."""
        kept = [dict(r) for r in records]
        data = b"".join(map(_line, kept))
        with self._lock:
            atomic_write(self.path, data, MODE)
            self._named = True
            self._close()
            self._size, self.records = len(data), kept

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        with explained("read", self.path):
            if self.path.stat().st_size > MAX_FILE_BYTES:
                raise LocalError(f"{self.path} is larger than {MAX_FILE_BYTES} bytes: restore it from a copy")
            data = self.path.read_bytes()
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            record = _record(line)
            if record is None and self._skip_damaged and self._size + len(line) < len(data):
                self.damaged += 1
                self._size += len(line)
                continue
            if record is None:
                if self._size + len(line) < len(data):
                    raise LocalError(f"{self.path} is damaged in line {number}: restore it from a copy")
                self._cut_off()
                return
            self.records.append(record)
            self._size += len(line)

    def _cut_off(self) -> None:
        """Remove a last line torn by a crash. Its ``append`` never returned, so nobody relies on it."""
        with explained("write", self.path):
            self._fd = disk.create(self.path, os.O_WRONLY | os.O_NOFOLLOW, MODE)
            disk.resize(self._fd, self.path, self._size)
            disk.sync(self._fd, self.path)


def _line(record: Mapping[str, Any]) -> bytes:
    # ASCII only, so that the final newline is the only line break.
    text = json.dumps(record, sort_keys=True).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    """Return the record in a line, or None if the line is torn or damaged."""
    if not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    text = line[9:-1]
    try:
        if int(line[:8], 16) != zlib.crc32(text):
            return None
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
