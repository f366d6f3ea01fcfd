"""Chooses the window of classes that makes positions smallest (docs/formats/delta-format.md §3, ``context``).

A census counts the levels in a sample of the words. The entropy of the changed words per class then gives each window's
cost. Classes and levels: see ``class_ranks``. Kernels are written as in ``kernels``.
"""

from __future__ import annotations

import numpy as np

from p2pcast.codec.class_ranks import BLOCK_WORDS, level_of
from p2pcast.codec.kernels import _kernel


@_kernel
def census(words, pace, shift, counts):  # type: ignore[no-untyped-def]
    """Count levels in every ``pace``-th block of 64 words; a shorter last block counts as a block."""
    spare = np.uint64(64 - 8 * words.itemsize)
    for block in range(0, (words.size + BLOCK_WORDS - 1) // BLOCK_WORDS, pace):
        end = min(BLOCK_WORDS * (block + 1), words.size)
        for k in range(BLOCK_WORDS * block, end):
            counts[level_of(words[k], spare, shift)] += 1


@_kernel
def _bits(ones, every):  # type: ignore[no-untyped-def]
    """Return the entropy in bits of which ``ones`` of ``every`` words change."""
    if ones <= 0.0 or ones >= every:
        return 0.0
    zeros = every - ones
    return -(ones * np.log2(ones / every)) - zeros * np.log2(zeros / every)


@_kernel
def _cheapest(every, changed, class_bits, costs, bases):  # type: ignore[no-untyped-def]
    """For 1, 4, 8, 12 and 16 classes: set ``costs`` to the fewest bits for positions and ``bases`` to that window's
    base, given the words and changes per level.
    """
    low = 0
    while low < every.size - 1 and every[low] == 0.0:
        low += 1
    high = every.size - 1
    while high > low and every[high] == 0.0:
        high -= 1
    single = np.zeros(every.size + 1)
    below = np.zeros(every.size + 1)
    above = np.zeros(every.size + 2)
    words = 0.0
    moved = 0.0
    for level in range(low, high + 1):
        words += every[level]
        moved += changed[level]
        single[level + 1] = single[level] + _bits(changed[level], every[level])
        below[level] = _bits(moved, words)
    words = moved = 0.0
    for back in range(high - low + 1):
        level = high - back
        words += every[level]
        moved += changed[level]
        above[level] = _bits(moved, words)
    for number in range(costs.size):
        classes = max(1, 4 * number)
        costs[number] = np.inf
        if classes == 1:
            costs[number] = below[high] + class_bits
            bases[number] = low
            continue
        for base in range(low, max(low, high - classes + 1) + 1):
            top = min(base + classes - 1, high)
            cost = below[base] + class_bits * classes
            if top > base:
                cost += single[top] - single[base + 1] + above[top]
            if cost < costs[number]:
                costs[number] = cost
                bases[number] = base


@_kernel
def choose_window(counts, scale, widths, changed, class_bits, near, ends):  # type: ignore[no-untyped-def]
    """Return (index into ``widths``, base, top) of the window with the fewest classes among those near the lowest cost.

    ``counts``: words per finest level in a census of one in ``scale`` words. ``changed``: changed words per finest
    level. ``widths``: finest levels per level, for each allowed shift. ``ends[c]`` is set to the number of changed
    words of class c or below.
    """
    costs, bases = np.empty(5), np.zeros(5, np.int64)
    least, found = np.inf, (0, 0, 0)
    for which in range(widths.size):
        width = widths[which]
        every, moved = np.zeros(256 // width), np.zeros(256 // width)
        for level in range(256):
            moved[level // width] += changed[level]
            every[level // width] += max(counts[level] * scale, np.float64(changed[level]))
        _cheapest(every, moved, class_bits, costs, bases)
        number = 0
        while costs[number] > costs.min() * (1.0 + near):
            number += 1
        if costs[number] < least:
            least, found = costs[number], (which, bases[number], max(0, 4 * number - 1))
    which, base, top = found
    ends[:] = 0
    for level in range(256):
        ends[min(max(level // widths[which] - base, 0), top)] += changed[level]
    for c in range(1, ends.size):
        ends[c] += ends[c - 1]
    return found
