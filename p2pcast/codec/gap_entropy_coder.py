"""Codes the gaps of the ``context`` codec with rANS and fixed geometric models. All arithmetic uses integers.

The gaps between changed members of a class follow a geometric distribution, so a class's model is one number: the mean.
Models do not adapt, so symbols can be decoded in parallel lanes. Specification: docs/formats/delta-format.md §3.

Kernels are written as in ``kernels``. Decoders read untrusted bytes: past the end they read zeros and report failure,
and every loop is bounded by a count that the caller has checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from p2pcast.codec.kernels import _kernel

SYMBOLS = 32
ESCAPE = SYMBOLS - 1
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_BITS = 31
STATE_MIN = 1 << 15
SPARE_BYTES = 16
"""Padding after the raw bits, which are fetched eight bytes at a time."""
FITTED = 512
"""Number of a class's gaps to which its model is fitted. Far fewer determine the mean to an eighth of an octave."""
MEANS = 8 * 27 + 1
"""Number of models: model k has mean gap 2^(k/8) − 1. A cell has at most 2^26 words."""
_ROOTS = (4294967296, 3938502375, 3611622602, 3311872529, 3037000499, 2784941737, 2553802833, 2341847523)
"""2^32 · 2^(−j/8), rounded down, j < 8."""

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U3 = np.uint64(3)
_U4 = np.uint64(4)
_U5 = np.uint64(5)
_U7 = np.uint64(7)
_U16 = np.uint64(16)
_U17 = np.uint64(17)
_U31 = np.uint64(31)
_U56 = np.uint64(56)
_NONE = np.uint32(0xFFFFFFFF)
_LOW16 = np.uint64(0xFFFF)
_BITS = np.uint64(SCALE_BITS)
_SLOTS = np.uint64(SCALE - 1)
_MIN = np.uint64(STATE_MIN)
_ESC = np.uint64(ESCAPE)
_ROW = np.uint64(SYMBOLS + 1)
_SCALE = np.uint64(SCALE)


def model(mean: int) -> tuple[int, list[int]]:
    """Return model ``mean``'s number of raw low bits, and its symbols' (gap >> low bits) 33 cumulative frequencies."""
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
"""The cumulative frequencies of every model, u16[MEANS · 33], and the numbers of raw low bits."""


@intrinsic  # type: ignore[untyped-decorator]
def _length(_typing: Any, bits: Any) -> Any:
    """Return a number's bit length; 0 for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _load(_typing: Any, row: Any, at: Any) -> Any:
    """Return eight bytes of ``row`` (u8) from ``at`` on, little-endian."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        load = builder.load(builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer()))
        load.align = 1
        return load

    return types.uint64(row, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(_typing: Any, row: Any, at: Any, value: Any) -> Any:
    """Write eight bytes to ``row`` (u8) from ``at`` on, little-endian."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        builder.store(args[2], place).align = 1
        return context.get_dummy_value()

    return types.void(row, types.uint64, types.uint64), generate


@_kernel
def fit_models(ranked, ends, means):  # type: ignore[no-untyped-def]
    """Fit each class's model to the mean of a sample of its gaps.

    Gaps many times longer than the mean are left out: they span rows without changes.
    """
    begin = 0
    for c in range(ends.size):
        counts = np.zeros(33, np.int64)
        sums = np.zeros(33, np.int64)
        pace = 1 + (ends[c] - begin) // FITTED
        for k in range(begin, ends[c], pace):
            gap = np.int64(ranked[k]) - (np.int64(ranked[k - 1]) + 1 if k > begin else 0)
            bits = _length(np.uint64(gap))
            counts[bits] += 1
            sums[bits] += gap
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
def _append_bits(raw, used, store, bits, value, length):  # type: ignore[no-untyped-def]
    """Append ``length`` (at most 56) bits. Whole bytes of ``store`` are written, so at most 7 bits remain in it."""
    store |= value << bits
    bits += length
    _store(raw, used, store)
    return used + (bits >> _U3), store >> (bits & _U56), bits & _U7


@_kernel
def pack_gaps(ranked, ends, means, starts, low_bits, symbols, words, raw):  # type: ignore[no-untyped-def]
    """Encode the gaps between ranks, class by class.

    ``symbols`` has space for one symbol per gap. ``words`` (u16, one per gap) is filled from its end, ``raw`` (u8, 10
    per gap and 8 more) from its start. Returns the four states, the index of the first used word, and the number of raw
    bytes used.
    """
    store, bits, used = _U0, _U0, _U0
    begin = _U0
    for c in range(ends.size):
        low = np.uint64(low_bits[means[c]])
        mask = (_U1 << low) - _U1
        end = np.uint64(ends[c])
        following = _U0
        for k in range(begin, end):
            gap = np.uint64(ranked[k]) - following
            following += gap + _U1
            symbol = gap >> low
            if symbol >= _ESC:
                beyond = symbol - _ESC + _U1
                length = _length(beyond) - _U1
                used, store, bits = _append_bits(raw, used, store, bits, length, _U5)
                used, store, bits = _append_bits(raw, used, store, bits, beyond ^ (_U1 << length), length)
                symbol = _ESC
            symbols[k] = np.uint8(symbol)
            used, store, bits = _append_bits(raw, used, store, bits, gap & mask, low)
        begin = end
    if bits:
        raw[used] = np.uint8(store)
        used += _U1
    # state // share equals (state * inverse) >> shift, since a state has 31 bits (Granlund and Montgomery 1994).
    inverses, shifts = np.empty(SYMBOLS, np.uint64), np.empty(SYMBOLS, np.uint64)
    shares, firsts = np.empty(SYMBOLS, np.uint64), np.empty(SYMBOLS, np.uint64)
    a, b, c3, d, at = _MIN, _MIN, _MIN, _MIN, np.uint64(words.size)
    for step in range(ends.size):
        c = ends.size - 1 - step
        first = np.uint64(ends[c - 1]) if c else _U0
        back: Any = np.uint64(ends[c])
        if back == first:
            continue
        row = np.uint64(means[c]) * _ROW
        for number in range(SYMBOLS):
            entry = row + np.uint64(number)
            share = np.uint64(starts[entry + _U1]) - np.uint64(starts[entry])
            shift = _U31 + _length(share - _U1)
            inverses[number] = ((_U1 << shift) + share - _U1) // share
            shifts[number], shares[number], firsts[number] = shift, share, np.uint64(starts[entry])
        while back > first:
            back -= _U1
            symbol = np.uint64(symbols[back])
            share = shares[symbol]
            full = np.uint64(d >= share << np.uint64(STATE_BITS - SCALE_BITS))
            words[at - _U1] = np.uint16(d & _LOW16)
            at -= full
            state = d >> (full << _U4)
            state += ((state * inverses[symbol]) >> shifts[symbol]) * (_SCALE - share) + firsts[symbol]
            a, b, c3, d = state, a, b, c3
    return a, b, c3, d, at, used


@_kernel
def _slots(starts, row, slots):  # type: ignore[no-untyped-def]
    """Fill ``slots`` for the model at ``row``. A slot has its symbol, its offset from the symbol's first slot (from bit
    5) and the symbol's share (from bit 17).
    """
    for symbol in range(SYMBOLS):
        entry = row + np.uint64(symbol)
        first, last = np.int64(starts[entry]), np.int64(starts[entry + _U1])
        for slot in range(first, last):
            slots[slot] = np.uint32(symbol | (slot - first) << 5 | (last - first) << 17)


@_kernel
def unpack_gaps(states, words, raw, ends, means, starts, low_bits, limit, ranked):  # type: ignore[no-untyped-def]
    """Fill ``ranked`` with ranks class by class, each class followed by 2³² − 1.

    Returns False if the bytes do not code that many ranks below ``limit``: words or bits are missing or left over, or a
    final state is wrong. ``words`` must end with an additional zero, and ``raw`` with ``SPARE_BYTES`` additional zeros.
    """
    slots = np.empty(SCALE, np.uint32)
    taken, at = _U0, _U0
    begin = _U0
    room, most = np.uint64(words.size - 1), np.uint64(raw.size - SPARE_BYTES) << _U3
    a, b, c3, d = states[0], states[1], states[2], states[3]
    valid: Any = True
    out = _U0
    for c in range(ends.size):
        end = np.uint64(ends[c])
        if end > begin:
            _slots(starts, np.uint64(means[c]) * _ROW, slots)
        low = np.uint64(low_bits[means[c]])
        mask = (_U1 << low) - _U1
        following = _U0
        for _ in range(begin, end):
            entry = np.uint64(slots[a & _SLOTS])
            state = (entry >> _U17) * (a >> _BITS) + ((entry >> _U5) & _SLOTS)
            short = np.uint64(state < _MIN)
            fetched = np.uint64(words[min(taken, room)])
            state = (state << _U16) | fetched if short else state
            taken += short
            a, b, c3, d = b, c3, d, state
            symbol = entry & _ESC
            here = min(at, most)
            if symbol == _ESC:
                length = (_load(raw, here >> _U3) >> (here & _U7)) & _ESC
                here = min(here + _U5, most)
                beyond = (_load(raw, here >> _U3) >> (here & _U7)) & ((_U1 << length) - _U1)
                at += _U5 + length
                here = min(here + length, most)
                symbol += ((_U1 << length) | beyond) - _U1
            gap = (symbol << low) | ((_load(raw, here >> _U3) >> (here & _U7)) & mask)
            at += low
            ranked[out] = np.uint32(following + gap)
            out += _U1
            following += gap + _U1
        valid &= following <= np.uint64(limit)
        ranked[out] = _NONE
        out += _U1
        begin = end
    whole = (at + _U7) >> _U3 == most >> _U3
    if at & _U7:
        whole &= raw[min(at, most) >> _U3] >> (at & _U7) == 0
    ended = a == _MIN and b == _MIN and c3 == _MIN and d == _MIN
    return valid and whole and ended and taken == room
