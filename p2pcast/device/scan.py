"""Compare and compact: find the words that differ in a long run of words, and copy them to the host, part by part.

A run is compared in one pass, regardless of its number of parts: reading an 8 MiB part takes less time than launching
its operations. Device memory: one byte per word, and positions (8 bytes) and values of at most 1/16 of the words,
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.digest import word_dtype
from p2pcast.device.words import words_of
from p2pcast.ground import limits

RUN_BYTES = 256 * limits.MIB
"""Bytes compared in one pass: much compared with the device's launch time, little compared with its memory."""

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes in one part: positions (u32, ascending, from its start), and the words there before and after."""

    positions: npt.NDArray[np.uint32]
    old: Words
    new: Words


def compare(
    old: torch.Tensor, new: torch.Tensor, parts: Sequence[tuple[int, int]], sparse: int
) -> list[Changes] | None:
    """Return the changes in each of ``parts`` (first word, words; ascending, disjoint); ignore words between parts.

    Returns None if more than one in ``sparse`` words differs. ``old``, ``new``: rows of up to 2³¹ words on one device.
    """
    was, now = words_of(old), words_of(new)
    differs = was != now
    if int(differs.count_nonzero()) * sparse > was.numel():
        return None
    places = differs.nonzero().view(-1)
    del differs
    edges = torch.tensor([edge for first, words in parts for edge in (first, first + words)], device=places.device)
    cuts, at, before, after = to_host(
        torch.searchsorted(places, edges),
        places.to(torch.int32),
        was.index_select(0, places),
        now.index_select(0, places),
    )
    width = word_dtype(was.element_size())
    positions, before, after = at.view(np.uint32), before.view(width), after.view(width)
    found = []
    for number, (first, _) in enumerate(parts):
        chosen = slice(int(cuts[2 * number]), int(cuts[2 * number + 1]))
        positions[chosen] -= np.uint32(first)  # in place: new memory would cost more than the subtraction
        found.append(Changes(positions[chosen], before[chosen], after[chosen]))
    return found


def to_host(*rows: torch.Tensor) -> list[Words]:
    """Return copies in host memory. A GPU writes them concurrently; the function waits until they are complete."""
    if not rows[0].is_cuda:
        return [row.cpu().numpy() for row in rows]
    copies = [torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True) for row in rows]
    torch.cuda.current_stream(rows[0].device).synchronize()
    return [copy.numpy() for copy in copies]
