"""Entropy coders of the ``context`` codec: gaps by rANS over fixed geometric models, bits by an adaptive binary arithmetic coder. Integers throughout.

A gap between changed members of a class is geometric as far as anybody can tell, so its model is one number, the mean, and nothing adapts: symbols decode
side by side. What adapts is the direction of a change (in matrices such as an output layer, a column's changes go one way for many rows) and the size of
steps in the few classes where it is not always one. Specification: docs/delta-format.md §3.

Kernels as in ``kernels``. Decoders are handed untrusted bytes: past the end they read zeros and say so, and every loop is bounded by a count that the
caller has checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from p2pcast.codec.kernels import _kernel
from p2pcast.codec.ranks import level_of

SYMBOLS = 32
ESCAPE = SYMBOLS - 1
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_MIN = 1 << 16
MEANS = 8 * 27 + 1
"""Models: the k-th is for gaps of mean 2^(k/8) − 1. A cell has at most 2^26 words."""
_ROOTS = (4294967296, 3938502375, 3611622602, 3311872529, 3037000499, 2784941737, 2553802833, 2341847523)
"""2^32 · 2^(−j/8), rounded down, j < 8."""

PROBABILITY_BITS = 16
_RATE = np.uint64(5)
_HALF = np.uint64(1 << (PROBABILITY_BITS - 1))
_ONE = np.uint64(1 << PROBABILITY_BITS)
DIRECTION_CONTEXTS = 81
LEVEL_CONTEXTS = 32
BIT_CONTEXTS = 64

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U5 = np.uint64(5)
_U8 = np.uint64(8)
_U16 = np.uint64(16)
_U24 = np.uint64(24)
_U32 = np.uint64(32)
_U64 = np.uint64(64)
_LOW16 = np.uint64(0xFFFF)
_LOW32 = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(SCALE_BITS)
_SLOTS = np.uint64(SCALE - 1)
_MIN = np.uint64(STATE_MIN)
_ESC = np.uint64(ESCAPE)
_ROW = np.uint64(SYMBOLS + 1)
_SCALE = np.uint64(SCALE)


def model(mean: int) -> tuple[int, list[int]]:
    """Low bits that go raw, and the 33 cumulative frequencies of the symbols (gap >> low bits), of model ``mean``."""
    low_bits = max(0, (mean >> 3) - 1)
    rate = (1 << 32) - (_ROOTS[mean & 7] >> (mean >> 3))
    for _ in range(low_bits):
        rate = rate * rate >> 32
    left, starts = 1 << 32, []
    for symbol in range(SYMBOLS):
        starts.append(symbol + ((SCALE - SYMBOLS) * ((1 << 32) - left) >> 32))
        left = left * rate >> 32
    return low_bits, [*starts, SCALE]


def _tables() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    rows = [model(mean) for mean in range(MEANS)]
    starts = np.array([row[1] for row in rows], dtype=np.uint16).reshape(-1)
    low_bits = np.array([row[0] for row in rows], dtype=np.int64)
    starts.flags.writeable = low_bits.flags.writeable = False
    return starts, low_bits


STARTS, LOW_BITS = _tables()
"""Of every model: cumulative frequencies u16[MEANS · 33], and raw low bits."""


@intrinsic  # type: ignore[untyped-decorator]
def _length(_typing: Any, bits: Any) -> Any:
    """How many bits a number has; 0 for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.uint64(types.uint64), generate


@_kernel
def fit(gaps, ends, means):  # type: ignore[no-untyped-def]
    """The model of each class: of the mean of its gaps, leaving out those many times longer (rows that nothing touched)."""
    begin = 0
    for c in range(ends.size):
        counts = np.zeros(33, np.int64)
        sums = np.zeros(33, np.int64)
        for k in range(begin, ends[c]):
            bits = _length(np.uint64(gaps[k]))
            counts[bits] += 1
            sums[bits] += np.int64(gaps[k])
        most: Any = 32
        mean = 0.0
        for _ in range(8):
            seen = max(1, counts[: most + 1].sum())
            mean = sums[: most + 1].sum() / seen
            within = np.int64(_length(np.uint64(8.0 * (mean + 1.0))))
            if within >= most:
                break
            most = within
        means[c] = min(max(np.int64(np.round(8.0 * np.log2(mean + 1.0))), 0), MEANS - 1)
        begin = ends[c]


@_kernel
def group(gaps, classes, ends, grouped):  # type: ignore[no-untyped-def]
    """Sorts gaps by class, in order within each. Fills ``ends``."""
    ends[:] = 0
    for k in range(classes.size):
        ends[classes[k]] += 1
    cursor = np.zeros(ends.size, np.int64)
    total = 0
    for c in range(ends.size):
        cursor[c] = total
        total += ends[c]
        ends[c] = total
    for k in range(classes.size):
        c = classes[k]
        grouped[cursor[c]] = gaps[k]
        cursor[c] += 1


@_kernel
def _flush(raw, used, store, bits):  # type: ignore[no-untyped-def]
    """Write four bytes of ``store`` once there are so many, so that 32 bits more fit."""
    if bits >= _U32:
        raw[used] = np.uint8(store)
        raw[used + _U1] = np.uint8(store >> _U8)
        raw[used + np.uint64(2)] = np.uint8(store >> _U16)
        raw[used + np.uint64(3)] = np.uint8(store >> _U24)
        used += np.uint64(4)
        store >>= _U32
        bits -= _U32
    return used, store, bits


@_kernel
def pack_gaps(gaps, ends, means, starts, low_bits, symbols, words, raw):  # type: ignore[no-untyped-def]
    """Codes gaps that stand class by class.

    ``symbols`` is room for one each. ``words`` (u16, one a gap is enough) is filled from its end, ``raw`` (u8, 10 a gap) from its beginning. Returns the
    two states, the first word that is used, and the raw bytes used.
    """
    store, bits, used = _U0, _U0, _U0
    begin = _U0
    for c in range(ends.size):
        low = np.uint64(low_bits[means[c]])
        mask = (_U1 << low) - _U1
        end = np.uint64(ends[c])
        for k in range(begin, end):
            gap = np.uint64(gaps[k])
            symbol = gap >> low
            if symbol >= _ESC:
                beyond = symbol - _ESC + _U1
                length = _length(beyond) - _U1
                store |= length << bits
                used, store, bits = _flush(raw, used, store, bits + _U5)
                store |= (beyond ^ (_U1 << length)) << bits
                used, store, bits = _flush(raw, used, store, bits + length)
                symbol = _ESC
            symbols[k] = np.uint8(symbol)
            store |= (gap & mask) << bits
            used, store, bits = _flush(raw, used, store, bits + low)
        begin = end
    while bits:
        raw[used] = np.uint8(store)
        used += _U1
        store >>= _U8
        bits -= min(bits, _U8)
    even, odd, at = _MIN, _MIN, np.uint64(words.size)
    for step in range(ends.size):
        c = ends.size - 1 - step
        row = np.uint64(means[c]) * _ROW
        first = np.uint64(ends[c - 1]) if c else _U0
        back: Any = np.uint64(ends[c])
        while back > first:
            back -= _U1
            entry = row + np.uint64(symbols[back])
            start = np.uint64(starts[entry])
            share = np.uint64(starts[entry + _U1]) - start
            isodd = back & _U1
            state = odd if isodd else even
            if state >= share << np.uint64(32 - SCALE_BITS):
                at -= _U1
                words[at] = np.uint16(state & _LOW16)
                state >>= _U16
            whole = np.uint64(np.uint32(state) // np.uint32(share))
            state += whole * (_SCALE - share) + start
            odd = state if isodd else odd
            even = even if isodd else state
    return even, odd, at, used


@_kernel
def _slots(starts, row, slots):  # type: ignore[no-untyped-def]
    """slot → symbol, of the model that begins at ``row``."""
    for symbol in range(SYMBOLS):
        entry = row + np.uint64(symbol)
        for slot in range(starts[entry], starts[entry + _U1]):
            slots[slot] = symbol


@_kernel
def _refill(raw, at, store, bits):  # type: ignore[no-untyped-def]
    """With fewer than 32 bits in ``store``: 32 more; past the end they are zeros."""
    if at + np.uint64(4) <= np.uint64(raw.size):
        four = np.uint64(raw[at]) | (np.uint64(raw[at + _U1]) << _U8)
        four |= (np.uint64(raw[at + np.uint64(2)]) << _U16) | (np.uint64(raw[at + np.uint64(3)]) << _U24)
        store |= four << bits
    else:
        for k in range(4):
            if at + np.uint64(k) < np.uint64(raw.size):
                store |= np.uint64(raw[at + np.uint64(k)]) << (bits + np.uint64(8 * k))
    return at + np.uint64(4), store, bits + _U32


@_kernel
def unpack_gaps(even, odd, words, raw, ends, means, starts, low_bits, limit, gaps):  # type: ignore[no-untyped-def]
    """Fills ``gaps``. False where the bytes can't be those of so many gaps below ``limit``: words or bits are missing or left over, states do not end where they began."""
    slots = np.empty(SCALE, np.uint8)
    store, bits, at, taken = _U0, _U0, _U0, _U0
    begin = _U0
    most = _U0
    room = np.uint64(words.size)
    for c in range(ends.size):
        end = np.uint64(ends[c])
        if end == begin:
            continue
        row = np.uint64(means[c]) * _ROW
        _slots(starts, row, slots)
        low = np.uint64(low_bits[means[c]])
        mask = (_U1 << low) - _U1
        for k in range(begin, end):
            state = odd if k & _U1 else even
            slot = state & _SLOTS
            symbol = np.uint64(slots[slot])
            entry = row + symbol
            start = np.uint64(starts[entry])
            state = (np.uint64(starts[entry + _U1]) - start) * (state >> _BITS) + slot - start
            if state < _MIN:
                if taken == room:
                    return False
                state = (state << _U16) | np.uint64(words[taken])
                taken += _U1
            odd = state if k & _U1 else odd
            even = even if k & _U1 else state
            if bits < _U32:
                at, store, bits = _refill(raw, at, store, bits)
            if symbol == _ESC:
                length = store & np.uint64(31)
                store >>= _U5
                bits -= _U5
                if bits < _U32:
                    at, store, bits = _refill(raw, at, store, bits)
                symbol += ((_U1 << length) | (store & ((_U1 << length) - _U1))) - _U1
                store >>= length
                bits -= length
                if bits < _U32:
                    at, store, bits = _refill(raw, at, store, bits)
            gap = (symbol << low) | (store & mask)
            store >>= low
            bits -= low
            most = max(most, gap)
            gaps[k] = np.uint32(gap)
        begin = end
    # Bits are fetched ahead of their use: what was used ends in the last byte, whose rest is zeros.
    ended = at - (bits >> np.uint64(3)) == np.uint64(raw.size) and store == _U0
    return even == _MIN and odd == _MIN and taken == room and ended and most < np.uint64(limit)


@_kernel
def _code(low, high, probability, bit, out, used):  # type: ignore[no-untyped-def]
    """One bit of an arithmetic coder that narrows [low, high] of 32 bits; ``probability`` (of a one) in 2⁻¹⁶."""
    middle = low + (((high - low) * probability) >> _U16)
    if bit:
        high = middle
    else:
        low = middle + _U1
    while (low ^ high) >> _U24 == _U0:
        out[used] = np.uint8(high >> _U24)
        used += 1
        low = (low << _U8) & _LOW32
        high = ((high << _U8) & _LOW32) | np.uint64(255)
    return low, high, used


@_kernel
def _finish(low, out, used):  # type: ignore[no-untyped-def]
    """The least that tells the interval: one byte more, of a value within."""
    out[used] = np.uint8((low >> _U24) + _U1)
    return used + 1


@_kernel
def _decode(low, high, code, probability, data, at):  # type: ignore[no-untyped-def]
    """(bit, low, high, code, at). Past the end it reads zeros."""
    middle = low + (((high - low) * probability) >> _U16)
    bit = _U1 if code <= middle else _U0
    if bit:
        high = middle
    else:
        low = middle + _U1
    while (low ^ high) >> _U24 == _U0:
        low = (low << _U8) & _LOW32
        high = ((high << _U8) & _LOW32) | np.uint64(255)
        code = (code << _U8) & _LOW32
        if at < data.size:
            code |= np.uint64(data[at])
        at += 1
    return bit, low, high, code, at


@_kernel
def _begin(data):  # type: ignore[no-untyped-def]
    """The first four bytes."""
    code = _U0
    for k in range(4):
        code <<= _U8
        if k < data.size:
            code |= np.uint64(data[k])
    return code


@_kernel
def _learn(probability, bit):  # type: ignore[no-untyped-def]
    return probability + ((_ONE - probability) >> _RATE) if bit else probability - (probability >> _RATE)


@_kernel
def count_directions(positions, ups, first, row_words, columns, counts):  # type: ignore[no-untyped-def]
    """How often each context met each direction, to tell whether they are worth it. ``columns`` (zeros, one a column) is left as it was."""
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        up = np.int64(ups[k])
        above = np.int64(columns[column])
        counts[2 * (9 * above + beside) + up] += 1
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0


@_kernel
def pack_directions(positions, ups, first, row_words, columns, out):  # type: ignore[no-untyped-def]
    """Each direction in the context of the last two in its column and the last two in its row. Returns the bytes used."""
    models = np.full(DIRECTION_CONTEXTS, _HALF, np.uint64)
    low, high, used = _U0, _LOW32, 0
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        above = np.int64(columns[column])
        context = 9 * above + beside
        up = np.int64(ups[k])
        low, high, used = _code(low, high, models[context], up, out, used)
        models[context] = _learn(models[context], up)
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0
    return _finish(low, out, used)


@_kernel
def unpack_directions(positions, data, first, row_words, columns, ups):  # type: ignore[no-untyped-def]
    """The way back. Returns whether the bytes were neither too few nor too many."""
    models = np.full(DIRECTION_CONTEXTS, _HALF, np.uint64)
    low, high, code, at = _U0, _LOW32, _begin(data), 4
    beside: Any = 0
    row_end = 0
    for k in range(positions.size):
        p = first + np.int64(positions[k])
        if p >= row_end:
            row_end = (p // row_words + 1) * row_words
            beside = 0
        column = p - row_end + row_words
        above = np.int64(columns[column])
        context = 9 * above + beside
        bit, low, high, code, at = _decode(low, high, code, models[context], data, at)
        up = np.int64(bit)
        models[context] = _learn(models[context], up)
        ups[k] = np.uint8(up)
        columns[column] = np.uint8(above // 3 + 3 * (up + 1))
        beside = beside // 3 + 3 * (up + 1)
    columns[:] = 0
    return at - 3 == data.size


@_kernel
def split(held, steps, shift, highest, contexts, ups, sizes):  # type: ignore[no-untyped-def]
    """Of each step: the context of its size (how far the level lies below ``highest``), whether the value goes up, and the size.

    Returns the contexts in which some size is not 1, a bit each.
    """
    bits = np.uint64(8 * held.itemsize)
    spare = _U64 - bits
    coded = _U0
    for k in range(held.size):
        word = np.uint64(held[k])
        step = np.uint64(steps[k])
        level = level_of(word, spare, shift)
        context = np.uint64(min(max(highest - np.int64(level), 0), LEVEL_CONTEXTS - 1))
        down = step >> (bits - _U1)
        size = ((step ^ (_U0 - down)) + down) & (~_U0 >> spare)
        contexts[k] = np.uint8(context)
        ups[k] = np.uint8((down ^ _U1) ^ (word >> (bits - _U1)))
        sizes[k] = size
        coded |= np.uint64(size != _U1) << context
    return coded


@_kernel
def pack_sizes(sizes, contexts, coded, width, out):  # type: ignore[no-untyped-def]
    """|step| of each change whose context's bit is set in ``coded``: length in unary and the bit below the first adaptively, the rest as it is.
    Returns the bytes used; 0 where there is nothing to say."""
    lengths = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    seconds = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    low, high, used, any_coded = _U0, _LOW32, 0, False
    last = np.uint64(width - 1)
    for k in range(sizes.size):
        context = np.uint64(contexts[k])
        if not (coded >> context) & _U1:
            continue
        any_coded = True
        size = np.uint64(sizes[k])
        length = _length(size) - _U1
        begin = context * np.uint64(BIT_CONTEXTS)
        for step in range(length + _U1):
            at = begin + np.uint64(step)
            if np.uint64(step) == last:
                break
            longer = np.int64(np.uint64(step) < length)
            low, high, used = _code(low, high, lengths[at], longer, out, used)
            lengths[at] = _learn(lengths[at], longer)
        if length == last:
            continue
        for step in range(length):
            bit = np.int64((size >> (length - _U1 - np.uint64(step))) & _U1)
            if step == 0:
                at = begin + length
                low, high, used = _code(low, high, seconds[at], bit, out, used)
                seconds[at] = _learn(seconds[at], bit)
            else:
                low, high, used = _code(low, high, _HALF, bit, out, used)
    return _finish(low, out, used) if any_coded else 0


@_kernel
def unpack_steps(data, held, ups, shift, highest, coded, steps):  # type: ignore[no-untyped-def]
    """Steps, from the words that they leave, directions, and sizes (1 where their context is not coded). Returns whether the bytes were neither too few nor too many."""
    lengths = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    seconds = np.full(LEVEL_CONTEXTS * BIT_CONTEXTS, _HALF, np.uint64)
    low, high, code, at = _U0, _LOW32, _begin(data), 4
    any_coded = False
    bits = np.uint64(8 * held.itemsize)
    spare = _U64 - bits
    last = bits - _U1
    for k in range(held.size):
        word = np.uint64(held[k])
        level = level_of(word, spare, shift)
        context = np.uint64(min(max(highest - np.int64(level), 0), LEVEL_CONTEXTS - 1))
        size = _U1
        if (coded >> context) & _U1:
            any_coded = True
            begin = context * np.uint64(BIT_CONTEXTS)
            length = _U0
            while length < last:
                here = begin + length
                bit, low, high, code, at = _decode(low, high, code, lengths[here], data, at)
                lengths[here] = _learn(lengths[here], np.int64(bit))
                if not bit:
                    break
                length += _U1
            if length == last:
                size <<= last
            elif length:
                here = begin + length
                bit, low, high, code, at = _decode(low, high, code, seconds[here], data, at)
                seconds[here] = _learn(seconds[here], np.int64(bit))
                size = _U2 | bit
                for _ in range(length - _U1):
                    bit, low, high, code, at = _decode(low, high, code, _HALF, data, at)
                    size = (size << _U1) | bit
        down = (np.uint64(ups[k]) ^ _U1) ^ (word >> last)
        steps[k] = (size ^ (_U0 - down)) + down
    return at - 3 == data.size if any_coded else data.size == 0
