"""The compiled loops of the codec: scan, digest, gaps, steps.

Promise: each kernel is a plain function of arrays, releases the GIL, checks nothing (callers do) and reads every dense byte once, at about the
speed of memory. Arrays that are only read must come through ``readonly``, so that a kernel is compiled once per word width and not once more
for maps that can't be written. Compiled code is cached on disk; a process that finds none pays a few seconds at the first call of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

Words = npt.NDArray[Any]

BLOCK_LANES = 1024
"""Lanes that share one multiplier of the digest."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_U1 = np.uint64(1)
_U10 = np.uint64(10)
_U27 = np.uint64(27)
_U30 = np.uint64(30)
_U31 = np.uint64(31)
_U32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
_LOW16 = np.uint64(0xFFFF)
_LANE = np.uint64(BLOCK_LANES - 1)


def readonly(array: Words) -> Words:
    """The same memory as an aligned, contiguous array that can't be written (copied only if it lies unaligned or strided)."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = array.copy()
    view = array.view()
    view.flags.writeable = False
    return view


def _kernel(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to keep a cache: a read-only installation without a home
        return njit(nogil=True)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _differences(_typing: Any, left: Any, right: Any, at: Any) -> Any:
    """A u64 with bit k set where ``left[at + k] != right[at + k]``, k < 64. Loads 64 words of each, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), 64)
        loads = []
        for kind, value in zip(signature.args[:2], args[:2], strict=True):
            data = arrayobj.make_array(kind)(context, builder, value).data
            load = builder.load(builder.bitcast(builder.gep(data, [args[2]]), vector.as_pointer()))
            load.align = 1
            loads.append(load)
        return builder.bitcast(builder.icmp_unsigned("!=", *loads), ir.IntType(64))

    return types.uint64(left, right, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(_typing: Any, bits: Any) -> Any:
    """The number of the lowest set bit; ``bits`` is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@_kernel
def mix(x):  # type: ignore[no-untyped-def]
    x ^= x >> _U30
    x *= _MIX1
    x ^= x >> _U27
    x *= _MIX2
    return x ^ (x >> _U31)


@_kernel
def multiplier(seed, block):  # type: ignore[no-untyped-def]
    """M(t, b) of docs/delta-format.md §2; ``seed`` is mix(t + 1)."""
    return mix(seed + _GOLDEN * (np.uint64(block) + _U1)) | _U1


@_kernel
def digest_lanes(lanes, first, seed, table):  # type: ignore[no-untyped-def]
    """Digest of u8 or u16 lanes, the first of which is lane ``first`` of its tensor.

    A lane has 16 bits, so its product with half of T fits 48 and the sum of a block 58: the halves are summed by 32 × 32 → 64 bit
    multiplications, which vector units have, and joined once a block.
    """
    total = np.uint64(0)
    done = 0
    while done < lanes.size:
        at = (first + done) & 1023
        count = min(1024 - at, lanes.size - done)
        part = lanes[done : done + count]
        factors = table[at : at + count]
        low = np.uint64(0)
        high = np.uint64(0)
        for k in range(count):
            lane = np.uint64(part[k])
            low += lane * (factors[k] & _LOW32)
            high += lane * (factors[k] >> _U32)
        total += (low + (high << _U32)) * multiplier(seed, (first + done) >> 10)
        done += count
    return total


@_kernel
def _lane_change(was, now, lane, lanes, table):  # type: ignore[no-untyped-def]
    """Σ (new − old) · T over the lanes of one changed word, whose first lane is ``lane`` (u64): all in one block."""
    if lanes == 1:
        return (now - was) * table[lane & _LANE]
    acc = np.uint64(0)
    for k in range(lanes):
        shift = np.uint64(16 * k)
        moved = ((now >> shift) & _LOW16) - ((was >> shift) & _LOW16)
        acc += moved * table[(lane + np.uint64(k)) & _LANE]
    return acc


@_kernel
def scan(old, new, first, lanes, seed, table, positions, steps):  # type: ignore[no-untyped-def]
    """Compare and compact: fills ``positions`` and ``steps`` (new − old) of the words that differ.

    ``first`` is the word's number in its tensor, ``lanes`` the lanes a word. Returns (number of changed words, change of the digest).
    Goes by blocks of the digest, so that each block's multiplier is made once.
    """
    block_words = 1024 // lanes
    found = 0
    delta = np.uint64(0)
    start = 0
    while start < old.size:
        lane = (first + start) * lanes
        stop = min(start + block_words - (lane & 1023) // lanes, old.size)
        acc = np.uint64(0)
        begin = found
        at = start
        while at + 64 <= stop:
            bits = _differences(old, new, at)
            was = old[at : at + 64]
            now = new[at : at + 64]
            while bits:
                k = _lowest(bits)  # unsigned, as an index: numba spares the test for negative ones
                bits &= bits - _U1
                positions[found] = np.uint32(np.uint64(at) + k)
                steps[found] = now[k] - was[k]
                here = np.uint64((first + at) * lanes) + k * np.uint64(lanes)
                acc += _lane_change(np.uint64(was[k]), np.uint64(now[k]), here, lanes, table)
                found += 1
            at += 64
        while at < stop:
            if old[at] != new[at]:
                positions[found] = np.uint32(at)
                steps[found] = new[at] - old[at]
                here = np.uint64((first + at) * lanes)
                acc += _lane_change(np.uint64(old[at]), np.uint64(new[at]), here, lanes, table)
                found += 1
            at += 1
        if found > begin:
            delta += acc * multiplier(seed, lane >> 10)
        start = stop
    return found, delta


@_kernel
def change(positions, was, now, first, lanes, seed, table):  # type: ignore[no-untyped-def]
    """Change of the digest by the words at ``positions``, which went from ``was`` to ``now``.

    The multiplier is made anew for every word: its latency hides behind the others', where keeping it would cost a branch that guesses wrong.
    """
    delta = np.uint64(0)
    for k in range(positions.size):
        lane = np.uint64((first + np.int64(positions[k])) * lanes)
        delta += _lane_change(np.uint64(was[k]), np.uint64(now[k]), lane, lanes, table) * multiplier(seed, lane >> _U10)
    return delta


@_kernel
def gather(words, positions, out):  # type: ignore[no-untyped-def]
    """``out[k] = words[positions[k]]``; numpy would first widen the positions."""
    for k in range(positions.size):
        out[k] = words[np.uint64(positions[k])]


@_kernel
def pack_gaps(positions, escape, out):  # type: ignore[no-untyped-def]
    """Positions to gap symbols (docs §3). ``out`` has room for all. Returns how many symbols."""
    used = 0
    previous = np.int64(-1)
    for k in range(positions.size):
        position = np.int64(positions[k])
        gap = position - previous - np.int64(1)
        previous = position
        while gap >= escape:
            out[used] = escape
            used += 1
            gap -= np.int64(escape)
        out[used] = gap
        used += 1
    return used


@_kernel
def unpack_gaps(symbols, escape, positions):  # type: ignore[no-untyped-def]
    """Gap symbols to positions; ``positions`` has one place more than there are symbols. Returns (how many, words spanned)."""
    found: Any = 0
    at = np.int64(-1)
    for k in range(symbols.size):
        symbol = np.int64(symbols[k])
        ends = np.int64(symbol != escape)
        at += symbol + ends
        positions[found] = np.uint32(at)
        found += ends
    return found, at + 1


@_kernel
def pack_steps16(steps, small, large):  # type: ignore[no-untyped-def]
    """u16 steps to streams A and B of docs §3. Returns how many places of ``large`` are used."""
    used = 0
    for k in range(steps.size):
        step = np.int64(np.int16(steps[k]))
        code = ((step << 1) ^ (step >> 63)) - 1
        small[k] = min(code, 255)
        if code >= 255:
            large[used] = code
            used += 1
    return used


@_kernel
def unpack_steps16(small, large, steps):  # type: ignore[no-untyped-def]
    """Streams A and B to u16 steps. Returns False where B does not belong to A or a step is zero."""
    used = 0
    for k in range(small.size):
        code = np.int64(small[k])
        if code == 255:
            if used == large.size:
                return False
            code = np.int64(large[used])
            used += 1
            if code < 255 or code == 65535:
                return False
        code += 1
        steps[k] = np.uint16((code >> 1) ^ -(code & 1))
    return used == large.size
