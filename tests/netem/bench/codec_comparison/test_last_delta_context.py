"""The saving by the last delta is exact for words with known entropies."""

from __future__ import annotations

import numpy as np

from netem.bench.codec_comparison.last_delta_context import Saving, add
from p2pcast.codec.layout import Cell

WORDS = 1 << 12


def found(before: np.ndarray, old: np.ndarray, new: np.ndarray) -> Saving:
    saving = Saving()
    add(saving, Cell(0, 0, 0, WORDS, 2, 0, 64), before, old, new)
    return saving


def test_words_that_move_on_cost_nothing() -> None:
    old = np.full(WORDS, 0x3F80, np.uint16)
    step = np.where(np.arange(WORDS) % 4 < 2, 1, 0) * np.where(np.arange(WORDS) % 2, 1, -1)
    before, new = (old - step).astype(np.uint16), (old + step).astype(np.uint16)
    saving = found(before, old, new)
    assert saving.changed == saving.moved_again == WORDS // 2
    # Half of the words change: one bit a word. Half of the changes go up: one bit a change.
    assert (saving.positions, saving.directions) == (WORDS / 8, WORDS / 16)


def test_words_that_rested_save_nothing() -> None:
    old = np.full(WORDS, 0x3F80, np.uint16)
    new = old + (np.arange(WORDS) % 2).astype(np.uint16)
    saving = found(old, old, new)
    assert (saving.moved_again, saving.positions, saving.directions) == (0, 0.0, 0.0)
