"""A snapshot of a shadow, read cell by cell while the shadow moves on.

Values overwritten meanwhile are saved until their cell has been read. A whole state can thus be written to disk during
live traffic, and the next version waits at most for the copy of one cell. Memory: 4 bytes plus a word for each value
that changes before its cell is read. Thread-safe for one reader and one writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version

Words = npt.NDArray[Any]
MOST_BYTES = 2 << 30
"""Limit on the saved values in bytes; if a reader is too slow for it, its reads fail."""


class ShadowSnapshot:
    """``version`` and ``digests`` (one u64 per cell) at the time of the snapshot. ``current``: returns a view of a
    cell's current words.
    """

    def __init__(self, version: Version, digests: npt.NDArray[np.uint64], current: Callable[[Cell], Words]) -> None:
        self.version = version
        self.digests = digests
        self._current = current
        self._lock = threading.Lock()
        self._saved: dict[int, list[tuple[npt.NDArray[np.uint32] | None, Words]]] = {}
        self._read: set[int] = set()
        self._saved_bytes = 0
        self._given_up = False

    def words(self, cell: Cell) -> Words:
        """Return a copy of a cell's words. Read each cell only once. Raises RetryableError after ``give_up``."""
        with self._lock:
            if self._given_up:
                raise RetryableError(
                    f"version {self.version} could not be read in time: too many values have changed since"
                )
            words = self._current(cell).copy()
            saved = self._saved.pop(cell.index, [])
            self._saved_bytes -= sum(_size(*kept) for kept in saved)
            self._read.add(cell.index)
        for positions, old in reversed(saved):
            if positions is None:
                words = old.copy()
            else:
                words[positions] = old
        return words

    def save(self, cell: Cell, positions: npt.NDArray[np.uint32] | None) -> None:
        """Save the words at ``positions`` (None: all) of a cell, before they are overwritten."""
        with self._lock:
            if cell.index in self._read or self._given_up:
                return
            words = self._current(cell)
            old = words.copy() if positions is None else words[positions]
            self._saved.setdefault(cell.index, []).append((positions, old))
            self._saved_bytes += _size(positions, old)
            if self._saved_bytes > MOST_BYTES:
                self._give_up()

    @property
    def nearly_full(self) -> bool:
        """Whether the saved values exceed half the limit, so that the reader should hurry."""
        return self._saved_bytes > MOST_BYTES // 2

    def give_up(self) -> None:
        """Make later reads fail."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        self._given_up = True
        self._saved.clear()


def _size(positions: npt.NDArray[np.uint32] | None, old: Words) -> int:
    return old.nbytes + (0 if positions is None else positions.nbytes)
