"""Bodies of results in files that only grow.

    segment file = N.seg, N counted from 0;  body = length (4 bytes, little-endian) + BLAKE3 hash (32 bytes) + bytes

Guarantees: after ``sync``, every appended body survives a crash. Opening cuts a torn or unsynced tail. A body that
``read`` returns has the hash that was written with it. Each start, and each write that fails, begins a new segment: a
body is never written after bytes of unknown state. A body that no row points to harms nothing: it is whole, so no
tail is cut before it, and it goes with its segment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

import blake3

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.process.shortages import scarce
from p2pcast.store.disk_room import check_room

SEGMENT_BYTES = 64 * limits.MIB
"""A segment that is at least so long is followed by the next. Retention deletes whole segments."""
HEAD_BYTES = 36


class Place(NamedTuple):
    segment: int
    offset: int
    length: int


class Segments:
    """``segment_bytes``: size after which the next segment begins."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        known = self.numbers()
        if known:
            self._cut_torn_tail(known[-1])
        self._number = known[-1] + 1 if known else 0
        self._file: BinaryIO | None = None
        self._dirty = False
        """Bodies were appended since the last sync."""
        self._lost = False
        """One of these bodies may not be in its file."""

    def numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self._folder.glob("*.seg") if p.stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.seg"

    def _cut_torn_tail(self, number: int) -> None:
        """Truncate the segment after its last whole body."""
        with open(self._path(number), "r+b") as file:
            whole = 0
            while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
                body = file.read(int.from_bytes(head[:4], "little"))
                if blake3.blake3(body).digest() != head[4:]:
                    break
                whole = file.tell()
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())

    def append(self, body: bytes) -> Place:
        """Append the body and return its place. It is durable after the next ``sync``. Raises LocalError."""
        try:
            if self._file is None:
                self._file = open(self._path(self._number), "xb")  # noqa: SIM115 - open until the segment is full
                self._sync_folder()
            at = self._file.tell()
            self._file.write(len(body).to_bytes(4, "little") + blake3.blake3(body).digest() + body)
        except OSError as error:
            self._lost = self._lost or self._dirty
            self._leave()
            raise self._failed(error) from error
        self._dirty = True
        return Place(self._number, at, len(body))

    def sync(self) -> None:
        """Make appended bodies durable. Raises LocalError if one may be lost: no row may point to any of them."""
        if self._lost:
            raise LocalError("a write to the ledger's segment files failed: try again")
        if self._file is None or not self._dirty:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._leave()
            raise self._failed(error) from error
        self._dirty = False
        if self._file.tell() >= self._segment_bytes:
            self._leave()

    def rolled_back(self) -> None:
        """Note that no row will point to the bodies appended since the last ``sync``."""
        self._lost = self._dirty = False

    def check_room(self) -> None:
        """Raises LocalError unless a body can be written."""
        check_room(self._folder)

    def _failed(self, error: OSError) -> LocalError:
        return LocalError(f"{self._folder}: results cannot be written ({error.strerror}): check the disk")

    def _leave(self) -> None:
        """The next body begins a new segment."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
        self._number += 1

    def read(self, place: Place) -> bytes:
        """Return a synced body. Raises IntegrityError if the stored bytes have changed."""
        try:
            with open(self._path(place.segment), "rb") as file:
                file.seek(place.offset)
                head, body = file.read(HEAD_BYTES), file.read(place.length)
        except OSError as error:
            said = f"{self._path(place.segment)}: cannot be read ({error.strerror})"
            # Without free descriptors the body is as whole as before; a device that fails has lost it.
            raise (LocalError if scarce(error) else IntegrityError)(said) from error
        if head[:4] != place.length.to_bytes(4, "little") or blake3.blake3(body).digest() != head[4:]:
            raise IntegrityError(f"{self._path(place.segment)}: the body at {place.offset} is damaged")
        return body

    @property
    def current(self) -> int:
        """Return the number of the segment that the next body is written to."""
        return self._number

    def prune(self, used: Collection[int], before: int) -> list[int]:
        """Delete the segments below ``before`` that no row points to. Returns their numbers."""
        gone = [n for n in self.numbers() if n not in used and n < before]
        for number in gone:
            self._path(number).unlink()
        if gone:
            self._sync_folder()
        return gone

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
