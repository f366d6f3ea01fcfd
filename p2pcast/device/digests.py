"""The digest of docs/formats/delta-format.md §2, computed on the device where the words are.

Takes about 12 bytes of memory per lane for a row, 40 for a box; callers pass parts. Only ``to_int`` synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from p2pcast.codec.digest import MASK, TABLE, seed
from p2pcast.codec.kernels import BLOCK_LANES
from p2pcast.device.words import signed, words_of

_GOLDEN = signed(0x9E3779B97F4A7C15)
_MIX1 = signed(0xBF58476D1CE4E5B9)
_MIX2 = signed(0x94D049BB133111EB)
_BIAS = 1 << 15


def to_int(total: torch.Tensor) -> int:
    """Return a digest as an unsigned Python integer. Waits for the device."""
    found: int = total.item()
    return found & MASK


def digest_row(row: torch.Tensor, first: int, tensor: int) -> torch.Tensor:
    """Return the digest (int64 scalar) of a contiguous row whose first word is word ``first`` of tensor ``tensor``."""
    lanes = _lanes(row)
    at = first * _lanes_a_word(row)
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    table = _table(row.device)
    head = min(-at % BLOCK_LANES, lanes.numel())
    whole = (lanes.numel() - head) // BLOCK_LANES * BLOCK_LANES
    for begin, count in ((0, head), (head, whole), (head + whole, lanes.numel() - head - whole)):
        if count:
            inside = (at + begin) % BLOCK_LANES
            width = min(count, BLOCK_LANES)
            sums = _weighted_sums(lanes[begin : begin + count].view(-1, width), table[inside : inside + width])
            sums *= _multipliers((at + begin) // BLOCK_LANES, sums.numel(), tensor, row.device)
            total += sums.sum()
    return total


def digest_box(box: torch.Tensor, start: int, strides: Sequence[int], tensor: int) -> torch.Tensor:
    """Return the digest (int64 scalar) of strided words: index c of ``box`` is word ``start`` + Σ cᵢ · ``strides``ᵢ of
    the tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=box.device)
    if not box.numel():
        return total
    places = torch.full(box.shape, start, dtype=torch.int64, device=box.device)
    for dim, (size, stride) in enumerate(zip(box.shape, strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64, device=box.device) * stride
        places += steps.view(-1, *(1 for _ in range(box.dim() - dim - 1)))
    lanes_a_word = _lanes_a_word(box)
    last = start + sum((size - 1) * stride for size, stride in zip(box.shape, strides, strict=True))
    block = start * lanes_a_word // BLOCK_LANES
    blocks = (last * lanes_a_word + lanes_a_word - 1) // BLOCK_LANES - block + 1
    multipliers = _multipliers(block, blocks, tensor, box.device)
    lanes = _lanes(box.reshape(-1).contiguous()).view(-1, lanes_a_word)
    places = places.view(-1) * lanes_a_word
    table = _table(box.device)
    for number in range(lanes_a_word):
        lane = places + number
        weights = table[lane % BLOCK_LANES]
        weights *= multipliers[lane // BLOCK_LANES - block]
        weights *= lanes[:, number].to(torch.int64) & 0xFFFF
        total += weights.sum()
    return total


def _lanes_a_word(row: torch.Tensor) -> int:
    return max(1, int(row.element_size()) // 2)


def _lanes(row: torch.Tensor) -> torch.Tensor:
    words = words_of(row)
    return words if words.element_size() == 1 else words.view(torch.int16)


def _weighted_sums(lanes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return Σ lane · factor for each row. 16-bit lanes are read as signed, with 2¹⁵ subtracted, so that they need not
    be widened first.
    """
    if lanes.dtype == torch.uint8:
        return (lanes * factors).sum(1)
    return ((lanes ^ -_BIAS) * factors).sum(1) + factors.sum() * _BIAS


def _multipliers(block: int, count: int, tensor: int, device: torch.device) -> torch.Tensor:
    """Return M(t, b) for ``count`` blocks, starting at ``block``."""
    numbers = torch.arange(block + 1, block + count + 1, dtype=torch.int64, device=device)
    return _mix(numbers * _GOLDEN + signed(int(seed(tensor)))) | 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _logical_shift_right(x, 30)) * _MIX1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX2
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x >> bits, with x as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=16)
def _table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(TABLE.astype(np.int64)).to(device)
