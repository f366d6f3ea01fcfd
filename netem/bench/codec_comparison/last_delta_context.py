"""Bytes that the last delta would save the next one, if codec ``context`` knew it: ``python -m
netem.bench.codec_comparison.last_delta_context [LEARNING_RATE…]``.

The context is how a word moved in the last delta: up, down, or not at all. Two entropies of the next delta are compared
without and with it: of which words change, given their level, and of the directions of those. The saving is an upper
bound, since an encoder also pays for the contexts themselves.

Sizes are in bytes of one delta of the pretrained weights (``adamw_steps``), summed over its cells.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from netem.fleet.adamw_steps import consecutive_states
from p2pcast.codec.context_codec import encode_context
from p2pcast.codec.layout import Cell, Layout

Array = npt.NDArray[Any]
SIGN = 0x8000


@dataclass
class Saving:
    """``payload``: of codec ``context`` as it is. ``moved_again``: changed words that the last delta changed, too."""

    payload: int = 0
    changed: int = 0
    moved_again: int = 0
    positions: float = 0.0
    directions: float = 0.0

    @property
    def share(self) -> float:
        return (self.positions + self.directions) / self.payload


def saving(layout: Layout, states: list[dict[str, Array]]) -> Saving:
    """``states``: three consecutive ones of bf16 words, by tensor."""
    found = Saving()
    for cell in layout.cells:
        name, words = layout.tensors[cell.tensor].name, slice(cell.start, cell.start + cell.words)
        before, old, new = (state[name][words] for state in states)
        add(found, cell, before, old, new)
    return found


def add(found: Saving, cell: Cell, before: Array, old: Array, new: Array) -> None:
    """Add one cell's bytes."""
    changed = old != new
    positions = np.flatnonzero(changed).astype(np.uint32)
    if not positions.size:
        return
    last, up = _direction(before, old), _direction(old, new)[positions] > 0
    level = (np.left_shift(old, 1) >> 8).astype(np.int64)
    found.payload += len(encode_context(cell, old, positions, (new - old)[positions]))
    found.changed += positions.size
    found.moved_again += int(np.count_nonzero(last[positions]))
    found.positions += (_entropy_bits(changed, level) - _entropy_bits(changed, 3 * level + last)) / 8
    found.directions += (_entropy_bits(up, np.zeros(up.size, np.int64)) - _entropy_bits(up, last[positions])) / 8


def _direction(old: Array, new: Array) -> Array:
    """−1, 0 or 1: how bf16 words moved as numbers."""
    ordered = [np.where(w & SIGN, SIGN - w.astype(np.int64), w.astype(np.int64)) for w in (old, new)]
    return np.asarray(np.sign(ordered[1] - ordered[0]))


def _entropy_bits(outcomes: Array, contexts: Array) -> float:
    """Bits of all outcomes (booleans), each given its context."""
    contexts = contexts - contexts.min()
    every = np.bincount(contexts).astype(float)
    ones = np.bincount(contexts, weights=outcomes)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(n > 0, -n * np.log2(n / every), 0.0) for n in (ones, every - ones)]
    return float(np.sum(parts))


def main() -> None:
    for rate in map(float, sys.argv[1:] or ("1e-6", "3e-6")):
        layout, states = consecutive_states(rate, 4)
        found = saving(layout, states[-3:])
        print(json.dumps({"learning_rate": rate, **asdict(found), "share": round(found.share, 4)}))


if __name__ == "__main__":
    main()
