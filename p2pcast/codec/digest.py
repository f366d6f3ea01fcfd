"""The digest of docs/formats/delta-format.md §2: a sum over 16-bit lanes.

Digests of parts add up, and a change costs O(changed). Promise: an accidental error goes unseen with probability at
most 2⁻⁴⁹. The digest authenticates nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec import kernels
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import UsageError

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def word_dtype(word_bytes: int) -> np.dtype[Any]:
    """The unsigned numpy dtype of words of this width."""
    return _UNSIGNED[word_bytes]


def lanes_of(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as lanes: u8 for 1-byte words, else u16."""
    return words if words.dtype.itemsize <= 2 else words.view(np.uint16)


def mix(x: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=1 << 16)
def seed(tensor: int) -> np.uint64:
    """mix(t + 1), the tensor's part of its multipliers."""
    return np.uint64(mix(tensor + 1))


TABLE = kernels.readonly(np.array([mix(_GOLDEN * (j + 1) & MASK) for j in range(kernels.BLOCK_LANES)], dtype=np.uint64))
"""T of docs/formats/delta-format.md §2."""


def check_words(words: npt.NDArray[Any], cell: Cell) -> npt.NDArray[Any]:
    """``words`` as a read-only array for a kernel. Raises UsageError if they can't be the words of ``cell``."""
    if words.ndim != 1 or words.dtype != _UNSIGNED[cell.word_bytes] or words.size != cell.words:
        raise UsageError(
            f"cell {cell.index}: got an array of {words.dtype}{list(words.shape)}, "
            f"need {cell.words} unsigned words of {cell.word_bytes} bytes"
        )
    return kernels.readonly(words)


def digest(words: npt.NDArray[Any], cell: Cell) -> int:
    """Digest of a cell that holds ``words``. One dense pass. Raises UsageError if the array does not fit the cell."""
    row = check_words(words, cell)
    first = cell.start * max(1, cell.word_bytes // 2)
    return int(kernels.digest_lanes(lanes_of(row), first, seed(cell.tensor), TABLE))


def digest_change(
    positions: npt.NDArray[Any], old_values: npt.NDArray[Any], new_values: npt.NDArray[Any], cell: Cell
) -> int:
    """Growth of a cell's digest (mod 2⁶⁴) when the words at ``positions`` go from ``old_values`` to ``new_values``.

    Positions (u32) count from the cell's start and ascend; values are unsigned words. O(changed).
    """
    return int(
        kernels.digest_of_change(
            kernels.readonly(positions),
            kernels.readonly(old_values),
            kernels.readonly(new_values),
            cell.start,
            seed(cell.tensor),
            TABLE,
        )
    )
