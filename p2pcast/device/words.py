"""Words and lanes as torch sees them: signed integers of their width."""

from __future__ import annotations

import torch

SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Word bytes → the dtype that words are computed with. Single bytes stay unsigned: they are lanes as they are."""


def words_of(row: torch.Tensor, word_bytes: int | None = None) -> torch.Tensor:
    """The same memory as words of so many bytes, by default of an element's."""
    return row.view(SIGNED[word_bytes or row.element_size()])


def signed(number: int) -> int:
    """A number below 2⁶⁴ as torch's int64 has it."""
    return number - (1 << 64) if number >> 63 else number
