"""A shadow as it was at one moment, read cell by cell while it goes on: what is overwritten meanwhile is kept aside until its cell has been read.

So a whole state is written to disk beside live traffic: the next version waits at most for the copying of one cell. Memory: the old values of what changes before it
was read, 4 bytes and a word a change. Thread-safe: one reads, one applies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.layout import Cell
from p2pcast.errors import RetryableError
from p2pcast.version import Version

Words = npt.NDArray[Any]
MOST_BYTES = 2 << 30
"""Kept aside; a reader so slow that more would gather is given up."""


class Frozen:
    """``version`` and ``digests`` (u64 a cell) of that moment. ``current``: a cell's words as they are now, a view."""

    def __init__(self, version: Version, digests: npt.NDArray[np.uint64], current: Callable[[Cell], Words]) -> None:
        self.version = version
        self.digests = digests
        self._current = current
        self._lock = threading.Lock()
        self._aside: dict[int, list[tuple[npt.NDArray[np.uint32] | None, Words]]] = {}
        self._read: set[int] = set()
        self._aside_bytes = 0
        self._given_up = False

    def words(self, cell: Cell) -> Words:
        """A copy; each cell may be asked for once. Raises RetryableError when it was given up."""
        with self._lock:
            if self._given_up:
                raise RetryableError(f"version {self.version} could not be read in time: too much has changed since")
            words = self._current(cell).copy()
            aside = self._aside.pop(cell.index, [])
            self._aside_bytes -= sum(_size(*kept) for kept in aside)
            self._read.add(cell.index)
        for positions, old in reversed(aside):
            if positions is None:
                words = old.copy()
            else:
                words[positions] = old
        return words

    def save(self, cell: Cell, positions: npt.NDArray[np.uint32] | None) -> None:
        """Before the words at ``positions`` (None: all) of a cell are overwritten."""
        with self._lock:
            if cell.index in self._read or self._given_up:
                return
            words = self._current(cell)
            old = words.copy() if positions is None else words[positions]
            self._aside.setdefault(cell.index, []).append((positions, old))
            self._aside_bytes += _size(positions, old)
            if self._aside_bytes > MOST_BYTES:
                self._give_up()

    @property
    def pressed(self) -> bool:
        """So much is kept aside that its reader should not wait any longer."""
        return self._aside_bytes > MOST_BYTES // 2

    def give_up(self) -> None:
        """Whoever reads gets an error."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        self._given_up = True
        self._aside.clear()


def _size(positions: npt.NDArray[np.uint32] | None, old: Words) -> int:
    return old.nbytes + (0 if positions is None else positions.nbytes)
