"""Patch files: a version's decoded changes against its base, for the shadow and for engines.

Guarantee: a file returned by ``PatchFile.open`` is complete and consistent with the layout. Every offset, count and
position is in range, so writing its values touches no memory outside the tensors. A file with its final name is
finished. Values are absolute, so applying a patch twice is harmless. Format: docs/formats/delta-format.md, section 8.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Layout
from p2pcast.files import disk, private_folders
from p2pcast.files.atomic_files import explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

logger = logging.getLogger("p2pcast.state")

MAGIC = b"p2pp\x01\0\0\0"
PART_SUFFIX = ".part"
"""Suffix of an unfinished patch. Opening the shadow removes those left by a killed process."""

_HEADER = struct.Struct("<8s32sIIQQQIIQ40x")
HEADER_BYTES = _HEADER.size
_ENTRY = np.dtype(
    [
        ("cell", "<u4"),
        ("dense", "<u4"),
        ("n", "<u8"),
        ("positions", "<u8"),
        ("words", "<u8"),
        ("before", "<u8"),
        ("after", "<u8"),
        ("changed", "<u8"),
    ]
)


def _padded(nbytes: int) -> int:
    return (nbytes + 7) & ~7


class PatchCell(Patch):
    """The changes of one cell, as views of the map.

    ``words`` (unsigned, of the cell's width) replace the words at ``positions`` (u32, ascending, counted from the
    cell's start), or the whole cell when ``dense``.
    """

    __slots__ = ()

    @property
    def dense(self) -> bool:
        return self.positions is None


class PatchWriter:
    """Writes a patch file row by row; ``path`` does not exist until ``finish``.

    ``add`` may be called from several threads, in any order of cells. Memory: 56 bytes per cell. Raises LocalError if
    the file system is full; after that, only ``abandon`` may be called.
    """

    def __init__(self, path: Path, layout: Layout, base: Version, version: Version) -> None:
        self.path = path
        self._layout, self._base, self._version = layout, base, version
        self._part = path.with_name(path.name + PART_SUFFIX)
        self._lock = threading.Lock()
        self._end = HEADER_BYTES
        self._rows: dict[int, tuple[int, ...]] = {}
        self._finished = False
        with explained("write", path):
            self._fd = disk.create(self._part, os.O_RDWR)
            try:
                # Remove a failed staging's leftover only after its owner is checked.
                private_folders.check_file(self._fd, self._part)
                if os.fstat(self._fd).st_size:
                    disk.resize(self._fd, self._part, 0)
            except BaseException:
                self._close()
                raise

    def add(self, patch: Patch) -> None:
        """Append the changes of one cell. Raises IntegrityError for a repeated cell or changes that do not fit it."""
        cell = self._layout.cells[patch.cell]
        dense = patch.positions is None
        words = np.ascontiguousarray(patch.words, dtype=word_dtype(cell.word_bytes))
        positions = np.ascontiguousarray(() if patch.positions is None else patch.positions, dtype="<u4")
        if len(words) != (cell.words if dense else len(positions)):
            raise IntegrityError(
                f"patch to {self._version}: cell {cell.index} has {len(words)} words; each change needs one"
            )
        lead = _padded(positions.nbytes)
        row = np.zeros(lead + _padded(words.nbytes), np.uint8)
        row[: positions.nbytes] = positions.view(np.uint8)
        row[lead : lead + words.nbytes] = words.view(np.uint8)
        with self._lock:
            if cell.index in self._rows:
                raise IntegrityError(f"patch to {self._version}: cell {cell.index} was added twice")
            at = self._end
            self._end += len(row)
            where = (0 if dense else at, at + lead)
            digests = (patch.before, patch.after)
            self._rows[cell.index] = (cell.index, int(dense), len(words), *where, *digests, patch.changed)
        self._write(row.data, at)

    def finish(self, state: int) -> None:
        """Write the index and header, then rename. ``state``: the whole state's digest after the patch."""
        index = np.array([self._rows[c] for c in sorted(self._rows)], dtype=_ENTRY)
        self._write(index.tobytes(), self._end)
        v, b = self._version, self._base
        head = (MAGIC, self._layout.layout_id, b.branch, v.branch, b.step, v.step)
        self._write(_HEADER.pack(*head, self._end, len(index), 0, state), 0)
        with explained("write", self.path):
            os.fchmod(self._fd, 0o400)  # engines map this file through descriptors
            disk.rename(self._part, self.path)
            self._finished = True
        self._close()

    def abandon(self) -> None:
        """Remove the file, finished or not. Further calls do nothing. No thread may be writing, because the number of a
        closed descriptor may be reused for a different file.

        If the file cannot be removed, this only warns: an error here would hide why the patch was abandoned, and a
        cancelled task would continue.
        """
        path = self.path if self._finished else self._part
        try:
            disk.unlink(path, missing_ok=True)
        except OSError as error:
            logger.warning("an abandoned patch stays, because it can't be removed: %s: %s", path, error)
        self._close()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        with explained("write", self.path):
            disk.write_at(self._fd, self._part, [data], at)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PatchFile:
    """A patch, mapped read-only. ``cells`` are ascending; their arrays are views of the map and keep it alive."""

    def __init__(self, name: str, buffer: mmap.mmap, layout: Layout) -> None:
        self.name = name
        self.nbytes = len(buffer)
        fields = _HEADER.unpack_from(buffer)
        magic, self.layout_id, base_branch, branch, base_step, step, end, count, zero, self.state = fields
        if magic != MAGIC:
            raise self._damaged("does not begin as a patch of version 1")
        if self.layout_id != layout.layout_id:
            raise self._damaged("is for another layout")
        self.base, self.version = Version.of([base_branch, base_step]), Version.of([branch, step])
        if zero or any(buffer[HEADER_BYTES - 40 : HEADER_BYTES]):
            raise self._damaged("has a reserved field set")
        if count > len(layout.cells):
            raise self._damaged(f"has {count} cells where the layout has {len(layout.cells)}")
        if end < HEADER_BYTES or end % 8 or end + count * _ENTRY.itemsize != self.nbytes:
            raise self._damaged(f"has {self.nbytes} bytes and does not end with its index of {count} cells at {end}")
        index = np.frombuffer(buffer, _ENTRY, count, end) if count else np.empty(0, _ENTRY)
        self._check_index(index, end, layout)
        self.cells: Sequence[PatchCell] = tuple(self._cell(buffer, entry, layout) for entry in index.tolist())

    @classmethod
    def open(cls, path: Path, layout: Layout) -> PatchFile:
        """Map and validate a patch. Raises IntegrityError (damaged, wrong layout) or LocalError (missing)."""
        with explained("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls.open_fd(fd, layout, str(path))
        finally:
            os.close(fd)

    @classmethod
    def open_fd(cls, fd: int, layout: Layout, name: str = "") -> PatchFile:
        """Like ``open``, from a descriptor, which the caller may close at any time after this call."""
        name = name or f"fd {fd}"
        size = os.fstat(fd).st_size
        if not HEADER_BYTES <= size <= limits.MAX_STATE_BYTES:
            raise IntegrityError(
                f"patch {name}: {size} bytes are too few or too many for a patch; stage the version again"
            )
        return cls(name, mmap.mmap(fd, size, prot=mmap.PROT_READ), layout)

    def _damaged(self, reason: str) -> IntegrityError:
        return IntegrityError(f"patch {self.name}: it {reason}; stage the version again")

    def _check_index(self, index: npt.NDArray[Any], end: int, layout: Layout) -> None:
        """Check that cells exist and ascend, and that the rows fill the file exactly, without gaps or overlaps."""
        number, dense, n = index["cell"].astype(np.int64), index["dense"], index["n"]
        if np.any(number >= len(layout.cells)) or np.any(np.diff(number) <= 0):
            raise self._damaged("lists cells that are out of range or out of order")
        cells = [layout.cells[c] for c in number.tolist()]
        words = np.array([c.words for c in cells], np.uint64)
        width = np.array([c.word_bytes for c in cells], np.int64)
        if np.any(dense > 1) or np.any(np.where(dense == 1, n != words, n > words)) or np.any(index["changed"] > n):
            raise self._damaged("has a row that does not fit its cell")
        if (
            np.any(index["positions"] > end)
            or np.any(index["words"] > end)
            or np.any((dense == 1) & (index["positions"] != 0))
        ):
            raise self._damaged("has a row outside the file")
        # No sum below can overflow: counts are at most a cell's words, and offsets at most the file's size.
        counts, at = n.astype(np.int64), index["words"].astype(np.int64)
        start = np.where(dense == 1, at, index["positions"].astype(np.int64))
        lead = np.where(dense == 1, 0, (counts * 4 + 7) & ~7)
        stop = at + ((counts * width + 7) & ~7)
        order = np.lexsort((stop, start))
        edges = np.concatenate(([HEADER_BYTES], stop[order]))
        if np.any(start + lead != at) or np.any(edges[:-1] != start[order]) or edges[-1] != end:
            raise self._damaged("has rows that do not fill it exactly")

    def _cell(self, buffer: mmap.mmap, entry: tuple[int, ...], layout: Layout) -> PatchCell:
        number, dense, n, at_positions, at_words, before, after, changed = entry
        cell = layout.cells[number]
        words = np.frombuffer(buffer, word_dtype(cell.word_bytes), n, at_words)
        if dense:
            return PatchCell(number, None, words, before, after, changed)
        positions: npt.NDArray[np.uint32] = np.frombuffer(buffer, "<u4", n, at_positions)
        if n and (int(positions[-1]) >= cell.words or not bool(np.all(positions[1:] > positions[:-1]))):
            raise self._damaged(f"has positions outside cell {number}, or not ascending")
        return PatchCell(number, positions, words, before, after, changed)
