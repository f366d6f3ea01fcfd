"""Ranks within classes (docs/formats/delta-format.md §3, ``context``), computed on the device where the old words are.

Classes are counted in blocks of 64 words, with one byte per class and eight classes in one integer; a sum over 64 words
cannot overflow a byte. Running sums over the blocks give the number of members of each class before each block. Then
only blocks with a change are read word by word. Takes 30 bytes of memory per word of a chunk, and 20 per change.
"""

from __future__ import annotations

import torch

from p2pcast.device.words import words_of

CLASSES = 16
BLOCK_WORDS = 64
CHUNK_WORDS = 1 << 22
CHUNK_CHANGES = 1 << 18
_LANES = 8


def census(row: torch.Tensor, pace: int, shift: int) -> torch.Tensor:
    """Count the words per level (magnitude >> ``shift``) in every ``pace``-th block of 64 words. Returns int64 [256].

    A shorter last block counts as a block.
    """
    words = words_of(row)
    blocks = words.numel() // BLOCK_WORDS
    whole, end = words[: blocks * BLOCK_WORDS], words[blocks * BLOCK_WORDS :]
    sampled = whole.view(-1, BLOCK_WORDS)[::pace].reshape(-1)
    if blocks % pace == 0:
        sampled = torch.cat((sampled, end))
    return torch.bincount(_levels(sampled, shift), minlength=256)


def ranks_by_class(row: torch.Tensor, places: torch.Tensor, shift: int, base: int, top: int) -> torch.Tensor:
    """Return the ranks of ``class_ranks``, class by class; within a class, in the order of ``places``."""
    ranks, classes = class_ranks(row, places, shift, base, top)
    return ranks.index_select(0, torch.sort(classes, stable=True).indices)


def class_ranks(
    row: torch.Tensor, places: torch.Tensor, shift: int, base: int, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ranks int32, classes uint8) of the words at ``places`` (int64, ascending).

    A word's rank is the number of words of the same class before it. Its class is min(max((magnitude >> ``shift``) −
    ``base``, 0), ``top``).
    """
    words = words_of(row)
    ranks = torch.empty(places.numel(), dtype=torch.int32, device=row.device)
    classes = torch.empty(places.numel(), dtype=torch.uint8, device=row.device)
    before = torch.zeros(CLASSES, dtype=torch.int64, device=row.device)
    starts = torch.arange(0, words.numel() + CHUNK_WORDS, CHUNK_WORDS, device=row.device)
    cuts = torch.searchsorted(places, starts).tolist()
    for number, start in enumerate(range(0, words.numel(), CHUNK_WORDS)):
        kinds = _classes(words[start : start + CHUNK_WORDS], shift, base, top)
        within = _before_blocks(kinds)
        for begin in range(cuts[number], cuts[number + 1], CHUNK_CHANGES):
            end = min(begin + CHUNK_CHANGES, cuts[number + 1])
            inside = places[begin:end] - start
            block = inside // BLOCK_WORDS
            kind = kinds.view(-1)[inside]
            alike = kinds[block] == kind.unsqueeze(1)
            alike &= torch.arange(BLOCK_WORDS, device=row.device) < (inside % BLOCK_WORDS).unsqueeze(1)
            of = kind.to(torch.int64)
            ranks[begin:end] = alike.sum(1) + within[of, block] + before[of]
            classes[begin:end] = kind
        before += within[:, -1]
    return ranks, classes


def _classes(words: torch.Tensor, shift: int, base: int, top: int) -> torch.Tensor:
    """Return the classes in blocks of 64; the last block is padded."""
    kinds = (_levels(words, shift) - base).clamp_(0, top).to(torch.uint8)
    return torch.nn.functional.pad(kinds, (0, -kinds.numel() % BLOCK_WORDS)).view(-1, BLOCK_WORDS)


def _levels(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the words' levels, which are below 256, as int16."""
    bits = 8 * words.element_size()
    # Mask after shifting: shifting a signed number copies its sign bit.
    return (((words << 1) >> shift) & ((1 << (bits - shift)) - 1)).to(torch.int16)


def _before_blocks(kinds: torch.Tensor) -> torch.Tensor:
    """Return [classes, blocks + 1]: the members of each class before each block; the last column has the totals.

    Each class is a row, because a GPU sums along rows in parallel, but along columns one by one.
    """
    halves = []
    index = kinds.to(torch.int32).view(-1)
    for first in range(0, CLASSES, _LANES):
        ones = [1 << 8 * (c - first) if first <= c < first + _LANES else 0 for c in range(CLASSES)]
        table = torch.tensor(ones, dtype=torch.int64, device=kinds.device)
        packed = table.index_select(0, index).view(-1, BLOCK_WORDS).sum(1)
        halves.append(packed.view(torch.uint8).view(-1, _LANES))
    counts = torch.cat(halves, 1).t().contiguous().cumsum(1, dtype=torch.int64)
    return torch.nn.functional.pad(counts, (1, 0))
