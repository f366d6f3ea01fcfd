"""Codes directions and sizes of steps for ``context`` with an adaptive binary arithmetic coder (integers only).

Two models adapt. One is for the direction of a change: in matrices such as an output layer, a column's changes keep one
direction for many rows. The other is for the step size, in the few classes with steps larger than one. Specification:
docs/formats/delta-format.md §3.

Kernels are written as in ``kernels``. Decoders read untrusted bytes: past the end they read zeros and report failure,
and every loop is bounded by a count that the caller has checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from p2pcast.codec.class_ranks import level_of
from p2pcast.codec.class_window import _bits
from p2pcast.codec.gap_entropy_coder import _length
from p2pcast.codec.kernels import _kernel

PROBABILITY_BITS = 16
_RATE = np.uint64(5)
_HALF = np.uint64(1 << (PROBABILITY_BITS - 1))
_ONE = np.uint64(1 << PROBABILITY_BITS)
DIRECTION_CONTEXTS = 81
"""Number of contexts for old words of one sign, if signs have separate contexts."""
LEARNING_BITS = 6.0
"""Approximate bits that a context costs in addition to its entropy."""
LEVEL_CONTEXTS = 32
BIT_CONTEXTS = 64

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U8 = np.uint64(8)
_U16 = np.uint64(16)
_U32 = np.uint64(32)
_U64 = np.uint64(64)
_LOW32 = np.uint64(0xFFFFFFFF)


@_kernel
def _code(low, high, probability, bit, out, used):  # type: ignore[no-untyped-def]
    """Encode one bit with an arithmetic coder whose interval [low, high] has 64 bits. ``probability``: that of a one,
    in units of 2⁻¹⁶.
    """
    middle = low + ((high - low) >> _U16) * probability
    low, high = (low, middle) if bit else (middle + _U1, high)
    while (low ^ high) >> _U32 == _U0:
        for k in range(4):
            out[used + k] = np.uint8(high >> np.uint64(56 - 8 * k))
        used += 4
        low <<= _U32
        high = (high << _U32) | _LOW32
    return low, high, used


@_kernel
def _final_bytes(low, high):  # type: ignore[no-untyped-def]
    """Return (number of further bytes that identify the interval if zeros follow, their value)."""
    size: Any = 1
    value = low
    while True:
        rest = np.uint64(64 - 8 * size)
        value = ((low >> rest) + _U1) << rest
        # Beyond 2⁶⁴ − 1 the sum wraps to 0.
        if low < value <= high:
            return size, value
        size += 1


@_kernel
def _finish(low, high, out, used):  # type: ignore[no-untyped-def]
    """Write the final bytes and return the number of bytes used."""
    size, value = _final_bytes(low, high)
    for k in range(size):
        out[used + k] = np.uint8(value >> np.uint64(56 - 8 * k))
    return used + size


@_kernel
def _finished(low, high, at, data):  # type: ignore[no-untyped-def]
    """Whether ``data`` ends where an encoder would have ended it. The decoder has fetched eight bytes ahead."""
    return at - 8 + _final_bytes(low, high)[0] == data.size


@_kernel
def _next_four_bytes(data, at):  # type: ignore[no-untyped-def]
    """Return four bytes, big-endian, with zeros past the end."""
    found = _U0
    for k in range(4):
        found <<= _U8
        if at + k < data.size:
            found |= np.uint64(data[at + k])
    return found


@_kernel
def _decode(low, high, code, probability, data, at):  # type: ignore[no-untyped-def]
    """Decode one bit. Returns (bit, low, high, code, at)."""
    middle = low + ((high - low) >> _U16) * probability
    bit = np.uint64(code <= middle)
    low, high = (low, middle) if bit else (middle + _U1, high)
    while (low ^ high) >> _U32 == _U0:
        low <<= _U32
        high = (high << _U32) | _LOW32
        code = (code << _U32) | _next_four_bytes(data, at)
        at += 4
    return bit, low, high, code, at


@_kernel
def _first_eight_bytes(data):  # type: ignore[no-untyped-def]
    """Return the first eight bytes, big-endian."""
    return (_next_four_bytes(data, 0) << _U32) | _next_four_bytes(data, 4)


@_kernel
def _adapt(probability, bit):  # type: ignore[no-untyped-def]
    return probability + ((_ONE - probability) >> _RATE) if bit else probability - (probability >> _RATE)


@_kernel
def direction_bits(positions, ups, scale, first, row_words, columns):  # type: ignore[no-untyped-def]
    """Estimate the bits of ``scale`` times as many directions. Returns (in context, in context with separate signs).

    ``ups``: bit 0 is the direction, bit 1 the old word's sign. ``columns`` (zeros, one per column) is left zero.
    """
    counts = np.zeros(4 * DIRECTION_CONTEXTS, np.int64)
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        up, sign = np.int64(ups[k]) & 1, np.int64(ups[k]) >> 1
        above = np.int64(columns[column])
        counts[2 * (DIRECTION_CONTEXTS * sign + 9 * above + beside) + up] += 1
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0
    together, apart = 0.0, 0.0
    for at in range(0, 2 * DIRECTION_CONTEXTS, 2):
        beyond = at + 2 * DIRECTION_CONTEXTS
        together += _adapted_bits(counts[at] + counts[beyond], counts[at + 1] + counts[beyond + 1], scale)
        apart += _adapted_bits(counts[at], counts[at + 1], scale) + _adapted_bits(
            counts[beyond], counts[beyond + 1], scale
        )
    return together, apart


@_kernel
def _adapted_bits(downs, ups, scale):  # type: ignore[no-untyped-def]
    """Return the bits of a context that occurs ``scale`` times as often."""
    every = downs + ups
    return scale * _bits(ups, every) + LEARNING_BITS if every else 0.0


@_kernel
def pack_directions(positions, ups, apart, first, row_words, columns, out):  # type: ignore[no-untyped-def]
    """Encode each direction in the context of the last two in its column and the last two in its row.

    If ``apart`` is 1, the old word's sign is part of the context. Returns the number of bytes used.
    """
    models = np.full(2 * DIRECTION_CONTEXTS, _HALF, np.uint64)
    low, high, used = _U0, ~_U0, 0
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        above = np.int64(columns[column])
        up, sign = np.int64(ups[k]) & 1, np.int64(ups[k]) >> 1
        context = DIRECTION_CONTEXTS * (sign & apart) + 9 * above + beside
        low, high, used = _code(low, high, models[context], up, out, used)
        models[context] = _adapt(models[context], up)
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0
    return _finish(low, high, out, used)


@_kernel
def unpack_directions(positions, held, data, apart, first, row_words, columns, ups):  # type: ignore[no-untyped-def]
    """Undo ``pack_directions``; ``held``: the old words. Returns whether the bytes ended where they should."""
    last = np.uint64(8 * held.itemsize - 1)
    models = np.full(2 * DIRECTION_CONTEXTS, _HALF, np.uint64)
    low, high, code, at = _U0, ~_U0, _first_eight_bytes(data), 8
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        above = np.int64(columns[column])
        context = DIRECTION_CONTEXTS * (np.int64(np.uint64(held[k]) >> last) & apart) + 9 * above + beside
        bit, low, high, code, at = _decode(low, high, code, models[context], data, at)
        up = np.int64(bit)
        models[context] = _adapt(models[context], up)
        ups[k] = np.uint8(up)
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0
    return _finished(low, high, at, data)


@_kernel
def list_coded_sizes(levels, highest, coded, listed):  # type: ignore[no-untyped-def]
    """Fill ``listed`` with the indices of the changes whose size is coded, because ``coded`` contains their level's
    context. Returns their number.
    """
    found = _U0
    for k in range(levels.size):
        listed[found] = np.uint32(k)
        found += (coded >> context_of(np.int64(levels[k]), highest)) & _U1
    return found


@_kernel
def context_of(level, highest):  # type: ignore[no-untyped-def]
    """Return a level's context number: its distance below the window's highest level."""
    return np.uint64(min(max(highest - level, 0), LEVEL_CONTEXTS - 1))


@_kernel
def pack_sizes(sizes, levels, listed, highest, width, out):  # type: ignore[no-untyped-def]
    """Encode |step| of the changes in ``listed``: the length in unary and the second bit adaptively, further bits as
    they are. Returns the number of bytes used, 0 if ``listed`` is empty.
    """
    lengths = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    seconds = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    low, high, used = _U0, ~_U0, 0
    last = np.uint64(width - 1)
    for number in range(listed.size):
        k = np.uint64(listed[number])
        context = context_of(np.int64(levels[k]), highest)
        size = np.uint64(sizes[k])
        length = _length(size) - _U1
        begin = context * np.uint64(BIT_CONTEXTS)
        for step in range(length + _U1):
            at = begin + np.uint64(step)
            if np.uint64(step) == last:
                break
            longer = np.int64(np.uint64(step) < length)
            low, high, used = _code(low, high, lengths[at], longer, out, used)
            lengths[at] = _adapt(lengths[at], longer)
        if length == last:
            continue
        for step in range(length):
            bit = np.int64((size >> (length - _U1 - np.uint64(step))) & _U1)
            if step == 0:
                at = begin + length
                low, high, used = _code(low, high, seconds[at], bit, out, used)
                seconds[at] = _adapt(seconds[at], bit)
            else:
                low, high, used = _code(low, high, _HALF, bit, out, used)
    return _finish(low, high, out, used) if listed.size else 0


@_kernel
def unpack_steps(data, held, ups, shift, highest, coded, listed, steps):  # type: ignore[no-untyped-def]
    """Decode steps from old words, directions and sizes; the size is 1 in contexts that are not coded. ``listed`` is
    scratch. Returns whether the bytes ended exactly where they should.
    """
    lengths = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    seconds = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    low, high, code, at = _U0, ~_U0, _first_eight_bytes(data), 8
    bits = np.uint64(8 * held.itemsize)
    spare = _U64 - bits
    last = bits - _U1
    found = _U0
    for k in range(held.size):
        word = np.uint64(held[k])
        level = level_of(word, spare, shift)
        listed[found] = np.uint32(k)
        found += (coded >> context_of(np.int64(level), highest)) & _U1
        down = (np.uint64(ups[k]) ^ _U1) ^ (word >> last)
        steps[k] = (_U1 ^ (_U0 - down)) + down
    for number in range(found):
        index = np.uint64(listed[number])
        word = np.uint64(held[index])
        begin = context_of(np.int64(level_of(word, spare, shift)), highest) * np.uint64(BIT_CONTEXTS)
        size: Any = _U1
        length = _U0
        while length < last:
            here = begin + length
            bit, low, high, code, at = _decode(low, high, code, lengths[here], data, at)
            lengths[here] = _adapt(lengths[here], np.int64(bit))
            if not bit:
                break
            length += _U1
        if length == last:
            size <<= last
        elif length:
            here = begin + length
            bit, low, high, code, at = _decode(low, high, code, seconds[here], data, at)
            seconds[here] = _adapt(seconds[here], np.int64(bit))
            size = _U2 | bit
            for _ in range(length - _U1):
                bit, low, high, code, at = _decode(low, high, code, _HALF, data, at)
                size = (size << _U1) | bit
        down = (np.uint64(ups[index]) ^ _U1) ^ (word >> last)
        steps[index] = (size ^ (_U0 - down)) + down
    return _finished(low, high, at, data) if found else data.size == 0
