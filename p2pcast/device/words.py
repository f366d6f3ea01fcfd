"""Words and lanes as torch dtypes: signed integers of the same width."""

from __future__ import annotations

import torch

SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Word bytes → dtype for arithmetic. Single bytes stay unsigned, since they are lanes themselves."""


def words_of(row: torch.Tensor, word_bytes: int | None = None) -> torch.Tensor:
    """Return the same memory as words of ``word_bytes`` bytes (default: the element size)."""
    return row.view(SIGNED[word_bytes or row.element_size()])


def signed(number: int) -> int:
    """Return a number below 2⁶⁴ as the int64 with the same bits."""
    return number - (1 << 64) if number >> 63 else number
