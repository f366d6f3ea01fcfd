"""The layout and signed records of an artifact that is being received, in order of arrival, in a file next to its log.

Guarantee: after a crash, the hashes show which pieces of the log are valid, so only the others are requested. The file
is never synced and never trusted: each record's signature is verified, and a torn end is ignored. If the file is
missing, the artifact is fetched again.

    any number of: u32 length of the record, u8 kind (1 layout document, 2 open, 3 batch, 4 manifest, 5 durable),
    the record
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path

from p2pcast.artifact.assembly import Assembly
from p2pcast.codec.layout import Layout
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError

SUFFIX = ".records"
_HEAD = struct.Struct("<IB")


class JournalKind(IntEnum):
    LAYOUT = 1
    OPEN = 2
    BATCH = 3
    MANIFEST = 4
    DURABLE = 5


Record = tuple[JournalKind, bytes]

_MOST_BYTES = {
    JournalKind.LAYOUT: limits.MAX_LAYOUT_BYTES,
    JournalKind.OPEN: limits.MAX_SIGNED_BYTES,
    JournalKind.BATCH: limits.MAX_SIGNED_BYTES,
    JournalKind.MANIFEST: limits.MAX_MANIFEST_BYTES,
    JournalKind.DURABLE: limits.MAX_DURABLE_BYTES,
}


class ArtifactJournal:
    """Appends records until it is closed, and ignores later ones. The first record creates the file. Thread-safe."""

    def __init__(self, path: Path, layout: Layout | None) -> None:
        """``layout``: None to continue an existing file."""
        self.path = path
        self._layout = layout
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        """Bytes of complete records. A failed write may have left part of a record after them."""
        self._closed = False

    def add(self, records: Iterable[Record]) -> None:
        """Append records. Raises LocalError (full disk …)."""
        with self._lock:
            if self._closed:
                return
            with explained("write", self.path):
                if self._fd < 0:
                    self._fd = disk.create(self.path, os.O_WRONLY | os.O_APPEND)
                    self._size = 0 if self._layout is not None else os.fstat(self._fd).st_size
                if self._layout is not None and not self._size:
                    records = [(JournalKind.LAYOUT, self._layout.document), *records]
                data = b"".join(_HEAD.pack(len(body), kind) + body for kind, body in records)
                if os.fstat(self._fd).st_size > self._size:
                    disk.resize(self._fd, self.path, self._size)
                disk.write_at(self._fd, self.path, [data], self._size)
                self._size += len(data)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def recover(path: Path, run_key: bytes) -> Assembly | None:
    """Return the assembly from a journal's valid records, or None if there are too few. Truncates the file after them.
    Raises LocalError.
    """
    assembly, good = _read(path, run_key)
    if assembly is None:
        return None
    with explained("write", path):
        fd = disk.create(path, os.O_WRONLY)
        try:
            disk.resize(fd, path, good)
        finally:
            os.close(fd)
    return assembly


def inspect(path: Path, run_key: bytes) -> Assembly | None:
    """Like ``recover``, but do not change the file."""
    return _read(path, run_key)[0]


def _read(path: Path, run_key: bytes) -> tuple[Assembly | None, int]:
    """Return the assembly, and the number of valid bytes in the file."""
    layout: Layout | None = None
    assembly: Assembly | None = None
    good = 0
    try:
        for kind, body in _records(path):
            if kind is JournalKind.LAYOUT:
                layout = Layout.from_document(body)
            elif kind is JournalKind.OPEN:
                if layout is None:
                    return None, 0
                assembly = assembly or Assembly(body, run_key, layout)
            elif assembly is None:
                return None, 0
            elif kind is JournalKind.BATCH:
                assembly.add_batch(body)
            elif kind is JournalKind.DURABLE:
                assembly.add_durable(body)
            else:
                assembly.add_manifest(body)
            good += _HEAD.size + len(body)
    except IntegrityError:
        if assembly is not None and assembly.broken:
            return None, 0
    return assembly, good


def _records(path: Path) -> Iterator[Record]:
    with explained("read", path), path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, number = _HEAD.unpack(head)
            if number not in JournalKind.__members__.values() or size > _MOST_BYTES[JournalKind(number)]:
                return
            body = file.read(size)
            if len(body) < size:
                return
            yield JournalKind(number), body
