"""Compare and compact: which words of a long run differ, brought to the host part by part.

A run is compared in one go, however many parts it has: a part of 8 MiB is read faster than its operations are started. Memory on the device: a byte a
word, and at most 1/16 of the words as positions (8 bytes) and values, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast import limits
from p2pcast.codec.digest import word_dtype
from p2pcast.device.words import words_of

RUN_BYTES = 256 * limits.MIB
"""Compared in one go: long against the time that a device takes to begin, short against its memory."""

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """Of one part: positions (u32, ascending, from its start), and the words there before and after."""

    positions: npt.NDArray[np.uint32]
    old: Words
    new: Words


def compare(old: torch.Tensor, new: torch.Tensor, parts: Sequence[tuple[int, int]], sparse: int) -> list[Changes] | None:
    """What changed in each of ``parts`` (first word, words: ascending, disjoint; what lies between is passed over). None where more than one word of
    ``sparse`` differs. ``old``, ``new``: rows of up to 2³¹ words on one device."""
    was, now = words_of(old), words_of(new)
    differs = was != now
    if int(differs.count_nonzero()) * sparse > was.numel():
        return None
    places = differs.nonzero().view(-1)
    del differs
    edges = torch.tensor([edge for first, words in parts for edge in (first, first + words)], device=places.device)
    cuts, at, before, after = to_host(
        torch.searchsorted(places, edges), places.to(torch.int32), was.index_select(0, places), now.index_select(0, places)
    )
    width = word_dtype(was.element_size())
    positions, before, after = at.view(np.uint32), before.view(width), after.view(width)
    found = []
    for number, (first, _) in enumerate(parts):
        begin, end = int(cuts[2 * number]), int(cuts[2 * number + 1])
        found.append(Changes(positions[begin:end] - np.uint32(first), before[begin:end], after[begin:end]))
    return found


def to_host(*rows: torch.Tensor) -> list[Words]:
    """Copies in the host's memory, which the device writes side by side."""
    if not rows[0].is_cuda:
        return [row.cpu().numpy() for row in rows]
    copies = [torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True) for row in rows]
    torch.cuda.current_stream(rows[0].device).synchronize()
    return [copy.numpy() for copy in copies]
