"""The digest of docs/formats/delta-format.md §2: a sum over 16-bit lanes.

The digests of parts add up, and updating a digest takes O(changed words). Guarantee: an accidental error goes
undetected with a probability of at most 2⁻⁴⁹. The digest does not authenticate anything.
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
    """Return the unsigned numpy dtype of words of this width."""
    return _UNSIGNED[word_bytes]


def lanes_of(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same memory as lanes: u8 for 1-byte words, otherwise u16."""
    return words if words.dtype.itemsize <= 2 else words.view(np.uint16)


def mix(x: int) -> int:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=1 << 16)
def seed(tensor: int) -> np.uint64:
    """Return mix(t + 1), the tensor's part of its multipliers."""
    return np.uint64(mix(tensor + 1))


TABLE = kernels.readonly(np.array([mix(_GOLDEN * (j + 1) & MASK) for j in range(kernels.BLOCK_LANES)], dtype=np.uint64))
"""T of docs/formats/delta-format.md §2."""


def check_words(words: npt.NDArray[Any], cell: Cell) -> npt.NDArray[Any]:
    """Return ``words`` as a read-only array for a kernel. Raises UsageError if they cannot be the words of ``cell``."""
    if words.ndim != 1 or words.dtype != _UNSIGNED[cell.word_bytes] or words.size != cell.words:
        raise UsageError(
            f"cell {cell.index}: got an array of {words.dtype}{list(words.shape)}, "
            f"need {cell.words} unsigned words of {cell.word_bytes} bytes"
        )
    return kernels.readonly(words)


def digest(words: npt.NDArray[Any], cell: Cell) -> int:
    """Return the digest of a cell with these words, in one dense pass. Raises UsageError if they do not fit it."""
    row = check_words(words, cell)
    first = cell.start * max(1, cell.word_bytes // 2)
    return int(kernels.digest_lanes(lanes_of(row), first, seed(cell.tensor), TABLE))


def digest_change(
    positions: npt.NDArray[Any], old_values: npt.NDArray[Any], new_values: npt.NDArray[Any], cell: Cell
) -> int:
    """Return the change (mod 2⁶⁴) of a cell's digest if words at ``positions`` go from ``old_values`` to
    ``new_values``.

    Positions (u32) count from the cell's start and ascend; values are unsigned words. Takes O(changed words).
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
