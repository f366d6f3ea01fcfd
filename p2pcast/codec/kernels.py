"""The compiled loops of the codec: scan, digest, gaps, steps.

Guarantees: each kernel is a plain function of arrays, releases the GIL, and reads every dense byte once, at about the
speed of memory. Kernels check nothing; their callers do. Arrays that are only read must come through ``readonly``, so
that a kernel is compiled once per word width and not again for read-only maps. Compiled code is cached on disk. Without
a cache, the first call of each kernel takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

Words = npt.NDArray[Any]

BLOCK_LANES = 1024
"""Lanes that share one multiplier of the digest."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_U1 = np.uint64(1)
_U4 = np.uint64(4)
_U10 = np.uint64(10)
_U27 = np.uint64(27)
_U30 = np.uint64(30)
_U31 = np.uint64(31)
_U32 = np.uint64(32)
_H1 = np.uint16(1)
_H4 = np.uint16(4)
_H8 = np.uint16(8)
_H15 = np.uint16(15)
_LOW32 = np.uint64(0xFFFFFFFF)
_LOW16 = np.uint64(0xFFFF)
_LANE = np.uint64(BLOCK_LANES - 1)


def readonly(array: Words) -> Words:
    """Return the array as aligned, contiguous and not writeable: a view, or a copy if it is unaligned or strided."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = array.copy()
    view = array.view()
    view.flags.writeable = False
    return view


def _kernel(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # there is no cache folder: a read-only installation without a home folder
        return njit(nogil=True)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _differences(_typing: Any, left: Any, right: Any, at: Any) -> Any:
    """Return a u64 whose bit k is set if ``left[at + k] != right[at + k]``, k < 64. Loads 64 words of each array, at
    any alignment.
    """

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
    """Return the index of the lowest set bit; 64 if no bit is set."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _count(_typing: Any, bits: Any) -> Any:
    """Return the number of set bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _lanes(_typing: Any, words: Any) -> Any:
    """Return the number of 16-bit lanes per word of this array. It is a compile-time constant, so loops over lanes are
    unrolled.
    """
    lanes = max(1, words.dtype.bitwidth // 16)

    def generate(context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
        return context.get_constant(types.int64, lanes)

    return types.int64(words), generate


@_kernel
def mix(x):  # type: ignore[no-untyped-def]
    x ^= x >> _U30
    x *= _MIX1
    x ^= x >> _U27
    x *= _MIX2
    return x ^ (x >> _U31)


@_kernel
def multiplier(seed, block):  # type: ignore[no-untyped-def]
    """Return M(t, b) of docs/formats/delta-format.md §2; ``seed`` is mix(t + 1)."""
    return mix(seed + _GOLDEN * (np.uint64(block) + _U1)) | _U1


@_kernel
def _block_sum(lanes, factors):  # type: ignore[no-untyped-def]
    """Return Σ lane · T over the lanes of one block.

    A lane has 16 bits, so its product with one half of T fits into 48 bits, and the sum over a block into 58. The low
    and high halves are summed with 32 × 32 → 64 bit multiplications, for which vector units have instructions. The two
    sums are combined at the end.
    """
    low = np.uint64(0)
    high = np.uint64(0)
    for k in range(lanes.size):
        lane = np.uint64(lanes[k])
        low += lane * (factors[k] & _LOW32)
        high += lane * (factors[k] >> _U32)
    return low + (high << _U32)


def _has_fused() -> bool:
    features = binding.get_host_cpu_features()
    return binding.get_default_triple().startswith("x86_64") and all(features.get(f) for f in ("avx512f", "avx512ifma"))


def _halves() -> list[int]:
    """Return T of docs/formats/delta-format.md §2 in groups of eight: the lower halves, then the upper halves."""
    left = (np.arange(BLOCK_LANES, dtype=np.uint64) + _U1) * _GOLDEN
    for shift, factor in ((_U30, _MIX1), (_U27, _MIX2)):
        left = (left ^ (left >> shift)) * factor
    left ^= left >> _U31
    halves: list[int] = (
        np.stack([(left & _LOW32).reshape(-1, 8), (left >> _U32).reshape(-1, 8)], axis=1).reshape(-1).tolist()
    )
    return halves


@intrinsic  # type: ignore[untyped-decorator]
def _fused(_typing: Any, lanes: Any, at: Any) -> Any:
    """Return ``_block_sum`` of two whole blocks of 16-bit lanes from ``at`` on, by fused multiply-add instructions.

    Two blocks are summed together because loading T takes as long as multiplying.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, wide, lane_row = ir.IntType(64), ir.VectorType(ir.IntType(64), 8), ir.VectorType(ir.IntType(16), 8)
        data = builder.gep(arrayobj.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        table = cgutils.global_constant(
            builder, "p2pcast_halves", ir.Constant(ir.ArrayType(word, 2 * BLOCK_LANES), _halves())
        )
        table.align = 64
        table = builder.bitcast(table, word.as_pointer())
        name = "llvm.x86.avx512.vpmadd52l.uq.512"
        fused = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(wide, [wide] * 3), name)
        sums = [[cgutils.alloca_once_value(builder, ir.Constant(wide, [0] * 8)) for _ in range(4)] for _ in range(2)]
        with cgutils.for_range(builder, ir.Constant(word, BLOCK_LANES // 16)) as loop:
            for part in range(2):
                group = builder.add(builder.mul(loop.index, ir.Constant(word, 2)), ir.Constant(word, part))
                halves = []
                for half in range(2):
                    place = builder.add(builder.mul(group, ir.Constant(word, 16)), ir.Constant(word, 8 * half))
                    load = builder.load(builder.bitcast(builder.gep(table, [place]), wide.as_pointer()))
                    load.align = 64
                    halves.append(load)
                for block in range(2):
                    place = builder.add(
                        builder.mul(group, ir.Constant(word, 8)), ir.Constant(word, BLOCK_LANES * block)
                    )
                    load = builder.load(builder.bitcast(builder.gep(data, [place]), lane_row.as_pointer()))
                    load.align = 2
                    some = builder.zext(load, wide)
                    for half in range(2):
                        kept = sums[block][2 * part + half]
                        builder.store(builder.call(fused, [builder.load(kept), some, halves[half]]), kept)
        found = []
        for block in range(2):
            low, high = (
                builder.add(builder.load(sums[block][half]), builder.load(sums[block][half + 2])) for half in range(2)
            )
            total = builder.add(low, builder.shl(high, ir.Constant(wide, [32] * 8)))
            one = ir.Constant(word, 0)
            for lane in range(8):
                one = builder.add(one, builder.extract_element(total, ir.Constant(ir.IntType(32), lane)))
            found.append(one)
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint64, 2)(lanes, types.int64), generate


if _has_fused():

    @_kernel
    def _two_sums(lanes, at, table):  # type: ignore[no-untyped-def]
        """Σ lane · T of each of two whole blocks from ``at`` on."""
        if lanes.itemsize == 2:
            return _fused(lanes, at)
        return _block_sum(lanes[at : at + 1024], table), _block_sum(lanes[at + 1024 : at + 2048], table)

else:

    @_kernel
    def _two_sums(lanes, at, table):  # type: ignore[no-untyped-def]
        """Σ lane · T of each of two whole blocks from ``at`` on."""
        return _block_sum(lanes[at : at + 1024], table), _block_sum(lanes[at + 1024 : at + 2048], table)


@_kernel
def digest_part(lanes, begin, end, first, seed, table):  # type: ignore[no-untyped-def]
    """Return the digest of u8 or u16 lanes ``begin`` … ``end``; ``first`` is the number of lane 0 in its tensor."""
    total = np.uint64(0)
    while begin < end:
        at = (first + begin) & 1023
        block = (first + begin) >> 10
        if at == 0 and end - begin >= 2048:
            one, two = _two_sums(lanes, begin, table)
            total += one * multiplier(seed, block) + two * multiplier(seed, block + 1)
            begin += 2048
            continue
        count = min(1024 - at, end - begin)
        total += _block_sum(lanes[begin : begin + count], table[at : at + count]) * multiplier(seed, block)
        begin += count
    return total


@_kernel
def digest_lanes(lanes, first, seed, table):  # type: ignore[no-untyped-def]
    """Return the digest of u8 or u16 lanes; ``first`` is the number of lane 0 in its tensor."""
    return digest_part(lanes, 0, lanes.size, first, seed, table)


@_kernel
def _word_change(was, now, lane, lanes, table):  # type: ignore[no-untyped-def]
    """Return Σ (new − old) · T over the lanes of one word. ``lane`` (u64): its first lane. A word is in one block."""
    if lanes == 1:
        return (now - was) * table[lane & _LANE]
    acc = np.uint64(0)
    for k in range(lanes):
        shift = np.uint64(16 * k)
        moved = ((now >> shift) & _LOW16) - ((was >> shift) & _LOW16)
        acc += moved * table[(lane + np.uint64(k)) & _LANE]
    return acc


@_kernel
def scan(old, new, first, seed, table, positions, held, steps):  # type: ignore[no-untyped-def]
    """Compare and compact: fill ``positions``, ``held`` (old) and ``steps`` (new − old) for the words that differ.

    ``first`` is the number of word 0 in its tensor. Returns (number of changed words, change of the digest).

    Each comparison of 64 words yields a mask. For every mask four positions are written, however many bits are set; the
    next mask overwrites the surplus. A loop over the set bits would mispredict its end for nearly every mask. Steps and
    digest are computed per digest block, while its words are in the L1 cache. Indices are unsigned, which avoids
    numba's test for negative indices.
    """
    lanes = _lanes(old)
    block_words = 1024 // lanes
    found = np.uint64(0)
    delta = np.uint64(0)
    origin = np.uint64(first) * np.uint64(lanes)
    start = 0
    while start < old.size:
        lane = (first + start) * lanes
        stop = min(start + block_words - (lane & 1023) // lanes, old.size)
        begin = found
        at = start
        while at + 64 <= stop:
            bits = _differences(old, new, at)
            count = _count(bits)
            base = np.uint64(at)
            for k in range(4):
                positions[found + np.uint64(k)] = np.uint32(base + _lowest(bits))
                bits &= bits - _U1
            following = found + _U4
            while bits:
                positions[following] = np.uint32(base + _lowest(bits))
                bits &= bits - _U1
                following += _U1
            found += count
            at += 64
        while at < stop:
            if old[at] != new[at]:
                positions[found] = np.uint32(at)
                found += _U1
            at += 1
        if found > begin:
            acc = np.uint64(0)
            for k in range(begin, found):
                p = np.uint64(positions[k])
                held[k] = old[p]
                steps[k] = new[p] - old[p]
                acc += _word_change(np.uint64(old[p]), np.uint64(new[p]), origin + p * np.uint64(lanes), lanes, table)
            delta += acc * multiplier(seed, lane >> 10)
        start = stop
    return np.int64(found), delta


@_kernel
def digest_of_change(positions, was, now, first, seed, table):  # type: ignore[no-untyped-def]
    """Return the change of the digest if the words at ``positions`` go from ``was`` to ``now``.

    The multiplier is computed for every word, because its latency overlaps with that of other words. Reusing it would
    take a branch that is often mispredicted.
    """
    lanes = _lanes(was)
    delta = np.uint64(0)
    for k in range(positions.size):
        lane = (np.uint64(first) + np.uint64(positions[k])) * np.uint64(lanes)
        delta += _word_change(np.uint64(was[k]), np.uint64(now[k]), lane, lanes, table) * multiplier(seed, lane >> _U10)
    return delta


@_kernel
def apply_steps(old, old_lanes, positions, steps, first, seed, table, audit, words):  # type: ignore[no-untyped-def]
    """Fill ``words`` with old + step at ``positions`` (ascending, in range). Returns (digest of old, change of the
    digest).

    One dense pass does both: a block's words are read for the digest and are still cached when its few steps need them.
    Without ``audit``, the digest of ``old`` is not computed, and only the changed words are read. ``old_lanes`` is the
    same memory as ``old``.
    """
    lanes = _lanes(old)
    held = np.uint64(0)
    delta = np.uint64(0)
    origin = np.uint64(first) * np.uint64(lanes)
    k = 0
    start: Any = 0
    while start < old.size and (audit or k < positions.size):
        if not audit:
            start = np.int64(positions[k])
        lane = (first + start) * lanes
        stop = min(start + (1024 - (lane & 1023)) // lanes, old.size)
        factor = multiplier(seed, lane >> 10)
        if audit:
            begin = lane & 1023
            held += (
                _block_sum(old_lanes[start * lanes : stop * lanes], table[begin : begin + (stop - start) * lanes])
                * factor
            )
        acc = np.uint64(0)
        while k < positions.size and np.int64(positions[k]) < stop:
            p = np.uint64(positions[k])
            words[k] = old[p] + steps[k]
            acc += _word_change(np.uint64(old[p]), np.uint64(words[k]), origin + p * np.uint64(lanes), lanes, table)
            k += 1
        delta += acc * factor
        start = stop
    return held, delta


@_kernel
def pack_gaps(positions, escape, out):  # type: ignore[no-untyped-def]
    """Convert positions to gap symbols (docs/formats/delta-format.md §3) in ``out``, which has space for all. Returns
    their number.
    """
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
    """Convert gap symbols to positions; ``positions`` has one element more than ``symbols``. Returns (positions found,
    words spanned).
    """
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
def _half_code(step):  # type: ignore[no-untyped-def]
    """Return min(z − 1, 15) of a u16 step. All arithmetic has 16 bits, so that the calling loop is vectorised."""
    sign = np.uint16(-(step >> 15))
    code = np.uint16(np.uint16(np.uint16(step << 1) ^ sign) - _H1)
    return min(code, _H15)


@_kernel
def pack_steps16(steps, halves, small, large):  # type: ignore[no-untyped-def]
    """Convert u16 steps to streams A, B and C of docs/formats/delta-format.md §3. Returns the lengths of ``small`` and
    ``large``.
    """
    for pair in range(steps.size // 2):
        halves[pair] = np.uint8(_half_code(steps[2 * pair]) | np.uint16(_half_code(steps[2 * pair + 1]) << _H4))
    if steps.size % 2:
        halves[-1] = np.uint8(_half_code(steps[-1]))
    smalls = np.uint64(0)
    larges = np.uint64(0)
    for k in range(steps.size):
        if np.uint16(steps[k] + _H8) > _H15:  # outside −8 … 7, the steps with codes 0 … 14
            step = np.int64(np.int16(steps[k]))
            code = ((step << 1) ^ (step >> 63)) - 1
            small[smalls] = min(code - 15, 255)
            smalls += _U1
            if code >= 270:
                large[larges] = code
                larges += _U1
    return smalls, larges


@_kernel
def _step_of_code(half):  # type: ignore[no-untyped-def]
    """Return the u16 step of a code below 15."""
    z = np.uint16(half + _H1)
    return np.uint16(np.uint16(z >> 1) ^ np.uint16(-(z & 1)))


@_kernel
def unpack_steps16(halves, small, large, steps):  # type: ignore[no-untyped-def]
    """Convert streams A, B and C to u16 steps. Returns False if the streams do not match or a step is zero."""
    for pair in range(steps.size // 2):
        steps[2 * pair] = _step_of_code(np.uint16(halves[pair] & 15))
        steps[2 * pair + 1] = _step_of_code(np.uint16(halves[pair] >> 4))
    if steps.size % 2:
        steps[-1] = _step_of_code(np.uint16(halves[-1] & 15))
    smalls = 0
    larges = 0
    for k in range(steps.size):
        if steps[k] == _H8:  # code 15, the escape, decodes to +8
            if smalls == small.size:
                return False
            code = 15 + np.int64(small[smalls])
            smalls += 1
            if code == 270:
                if larges == large.size:
                    return False
                code = np.int64(large[larges])
                larges += 1
                if code < 270 or code == 65535:
                    return False
            code += 1
            steps[k] = np.uint16((code >> 1) ^ -(code & 1))
    return smalls == small.size and larges == large.size
