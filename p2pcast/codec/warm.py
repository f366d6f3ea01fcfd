"""Loads compiled kernels before they matter.

A kernel is compiled, or read from its cache, when it is first called with arrays of some kind, and holds the interpreter meanwhile: seconds, on a slow machine. In the middle of a broadcast
a daemon that stands still for so long looks dead. So daemons go through every way that a cell of their layout can be coded, once, while nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from p2pcast.codec.cell import apply, decode, encode
from p2pcast.codec.digest import digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell, Layout

WORDS = 4096
"""Enough for gaps of both widths: many changes make narrow ones, a single change wide ones."""


def warm_up(widths: Iterable[int] = (2,)) -> None:
    """For cells of these word widths (bytes)."""
    for width in sorted(set(widths)):
        cell = Cell(0, 0, 0, WORDS + 1, width, 0, 64)
        old = np.arange(WORDS + 1).astype(word_dtype(width))
        old.flags.writeable = False
        for positions in (np.arange(0, WORDS, 7), np.array([WORDS // 2])):
            for step in (1, (1 << (8 * width - 1)) - 1):
                new = old.copy()
                new[positions] += np.array(step, new.dtype)
                _once(cell, old, new)


def warm_up_for(layout: Layout) -> None:
    """For every cell that the layout has."""
    warm_up(t.word_bytes for t in layout.tensors)


def _once(cell: Cell, old: np.ndarray, new: np.ndarray) -> None:
    new.flags.writeable = False
    before = digest(old, cell)
    for codec in ("auto", "flat", "dense", "context"):
        coded = encode(cell, old, new, before=before, codec=codec)
        assert coded is not None
        patch = decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
        target = old.copy()
        apply(patch, target)
        if patch.positions is not None:
            # As a patch that was mapped from its file: not to be written to.
            positions, words = patch.positions.copy(), patch.words.copy()
            positions.flags.writeable = words.flags.writeable = False
            digest_change(positions, old[positions], words, cell)
        digest(target, cell)
