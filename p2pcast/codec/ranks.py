"""Ranks within classes: the compiled loops that turn positions into gaps between members of one class, and back.

A word's *level* is ((w << 1) >> shift): its magnitude's exponent, the sign dropped. Its *class* is the level in a window, min(max(level − base, 0), top).
64 words are looked at at a time: their classes become four masks, one a bit of the class (*planes*), from which the members of any class are three ANDs
away and counted by popcount; no loop runs over words. 64 such blocks are surveyed before their changes are looked at.

As in ``kernels``: arrays that are read come through ``readonly``, and callers check. What a damaged payload can reach is bounded here: ``unrank`` writes
no more positions than there is room for, all inside the words that it was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from p2pcast.codec.kernels import _block_sum, _count, _kernel, _lanes, _lowest, multiplier

CLASSES = 16
"""At most: four bits a word."""
BLOCK_WORDS = 64
STRETCH_BLOCKS = 64
"""Blocks surveyed at a time: few enough for the nearest cache, so many that loops over their changes rarely end."""
STRETCH_WORDS = BLOCK_WORDS * STRETCH_BLOCKS

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U3 = np.uint64(3)
_U4 = np.uint64(4)
_U5 = np.uint64(5)
_U6 = np.uint64(6)
_U7 = np.uint64(7)
_U8 = np.uint64(8)
_U9 = np.uint64(9)
_U16 = np.uint64(16)
_U63 = np.uint64(63)
_U64 = np.uint64(64)
_NEVER = np.uint64(1 << 62)


@intrinsic  # type: ignore[untyped-decorator]
def _planes(_typing: Any, words: Any, at: Any, shift: Any, base: Any, top: Any) -> Any:
    """Four u64: bit k of the j-th is bit j of the class of ``words[at + k]``, k < 64. Loads 64 words, at any alignment."""
    found = types.UniTuple(types.uint64, 4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        width = kind.dtype.bitwidth
        row, narrow = ir.VectorType(ir.IntType(width), 64), ir.VectorType(ir.IntType(8), 64)
        zero = ir.Constant(narrow, [0] * 64)

        def splat(value: Any, vector: Any) -> Any:
            scalar = value if vector.element.width == 64 else builder.trunc(value, vector.element)
            empty = ir.Constant(vector, ir.Undefined)
            one = builder.insert_element(empty, scalar, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))

        data = arrayobj.make_array(kind)(context, builder, args[0]).data
        load = builder.load(builder.bitcast(builder.gep(data, [args[1]]), row.as_pointer()))
        load.align = 1
        level = builder.lshr(builder.shl(load, ir.Constant(row, [1] * 64)), splat(args[2], row))
        level = builder.trunc(level, narrow) if width > 8 else level
        lowest, highest = splat(args[3], narrow), splat(args[4], narrow)
        # Written so that they become a saturating subtraction and a minimum.
        above = builder.select(builder.icmp_unsigned(">", level, lowest), builder.sub(level, lowest), zero)
        above = builder.select(builder.icmp_unsigned("<", above, highest), above, highest)
        planes = []
        for bit in range(4):
            sign = builder.shl(above, ir.Constant(narrow, [7 - bit] * 64))
            planes.append(builder.bitcast(builder.icmp_signed("<", sign, zero), ir.IntType(64)))
        return context.make_tuple(builder, signature.return_type, planes)

    return found(words, types.uint64, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _deposit(_typing: Any, bits: Any, mask: Any) -> Any:
    """x86's PDEP: the low bits of ``bits``, put in order where ``mask`` has ones."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        name = "llvm.x86.bmi.pdep.64"
        known = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(word, [word, word]), name)
        return builder.call(known, args)

    return types.uint64(types.uint64, types.uint64), generate


def _has_deposit() -> bool:
    return binding.get_default_triple().startswith("x86_64") and bool(binding.get_host_cpu_features().get("bmi2"))


if _has_deposit():

    @_kernel
    def _member(mask, number):  # type: ignore[no-untyped-def]
        """The set bit ``number`` (from 0) of ``mask``; 0 where there are not so many."""
        return _deposit(_U1 << number, mask)

else:

    @_kernel
    def _member(mask, number):  # type: ignore[no-untyped-def]
        """The set bit ``number`` (from 0) of ``mask``; 0 where there are not so many."""
        for _ in range(number):
            mask &= mask - _U1
        return mask & (~mask + _U1)


@_kernel
def level_of(word, spare, shift):  # type: ignore[no-untyped-def]
    """The level of a word that leaves ``spare`` bits of 64 (u64). ``shift`` must leave at most 255."""
    return ((np.uint64(word) << (spare + _U1)) >> spare) >> np.uint64(shift)


@_kernel
def survey(words, at, blocks, shift, base, top, planes, ranks):  # type: ignore[no-untyped-def]
    """Planes of ``blocks`` blocks from ``at`` on, and in ``ranks[16 b + c]`` how many of class c stand before block b, beginning with what row 0 says."""
    for number in range(blocks):
        b = np.uint64(number)
        p0, p1, p2, p3 = _planes(words, at + _U64 * b, shift, base, top)
        q = b * _U4
        planes[q] = p0
        planes[q + _U1] = p1
        planes[q + _U2] = p2
        planes[q + _U3] = p3
        n0, n1, n2, n3 = ~p0, ~p1, ~p2, ~p3
        l0, l1, l2, l3 = n0 & n1, p0 & n1, n0 & p1, p0 & p1
        r = b * _U16
        high = n2 & n3
        ranks[r + np.uint64(16)] = ranks[r] + np.uint32(_count(l0 & high))
        ranks[r + np.uint64(17)] = ranks[r + np.uint64(1)] + np.uint32(_count(l1 & high))
        ranks[r + np.uint64(18)] = ranks[r + np.uint64(2)] + np.uint32(_count(l2 & high))
        ranks[r + np.uint64(19)] = ranks[r + np.uint64(3)] + np.uint32(_count(l3 & high))
        if top > 3:
            high = p2 & n3
            ranks[r + np.uint64(20)] = ranks[r + np.uint64(4)] + np.uint32(_count(l0 & high))
            ranks[r + np.uint64(21)] = ranks[r + np.uint64(5)] + np.uint32(_count(l1 & high))
            ranks[r + np.uint64(22)] = ranks[r + np.uint64(6)] + np.uint32(_count(l2 & high))
            ranks[r + np.uint64(23)] = ranks[r + np.uint64(7)] + np.uint32(_count(l3 & high))
        if top > 7:
            high = n2 & p3
            ranks[r + np.uint64(24)] = ranks[r + np.uint64(8)] + np.uint32(_count(l0 & high))
            ranks[r + np.uint64(25)] = ranks[r + np.uint64(9)] + np.uint32(_count(l1 & high))
            ranks[r + np.uint64(26)] = ranks[r + np.uint64(10)] + np.uint32(_count(l2 & high))
            ranks[r + np.uint64(27)] = ranks[r + np.uint64(11)] + np.uint32(_count(l3 & high))
        if top > 11:
            high = p2 & p3
            ranks[r + np.uint64(28)] = ranks[r + np.uint64(12)] + np.uint32(_count(l0 & high))
            ranks[r + np.uint64(29)] = ranks[r + np.uint64(13)] + np.uint32(_count(l1 & high))
            ranks[r + np.uint64(30)] = ranks[r + np.uint64(14)] + np.uint32(_count(l2 & high))
            ranks[r + np.uint64(31)] = ranks[r + np.uint64(15)] + np.uint32(_count(l3 & high))


@_kernel
def _members(planes, b, c):  # type: ignore[no-untyped-def]
    """Members of class c in block b."""
    q = b * _U4
    found = planes[q] ^ ((c & _U1) - _U1)
    found &= planes[q + _U1] ^ (((c >> _U1) & _U1) - _U1)
    found &= planes[q + _U2] ^ (((c >> _U2) & _U1) - _U1)
    return found & (planes[q + _U3] ^ (((c >> _U3) & _U1) - _U1))


@_kernel
def rank(words, place, positions, first, shift, base, top, ranks, last, gaps, classes):  # type: ignore[no-untyped-def]
    """The class of each position, and how many of that class stand between it and the one before it.

    ``words``: whole blocks, the first of which is word ``place`` of the cell; positions from the ``first``-th on. ``ranks`` (its row 0) and ``last`` carry
    what was counted from one call to the next. Returns the number of the next position.
    """
    planes = np.empty(4 * STRETCH_BLOCKS, np.uint64)
    changed = np.uint64(positions.size)
    k = np.uint64(first)
    at = 0
    while at < words.size and k < changed:
        blocks = min(STRETCH_BLOCKS, (words.size - at) >> 6)
        survey(words, np.uint64(at), blocks, shift, base, top, planes, ranks)
        begin = np.uint64(place + at)
        stop = begin + np.uint64(BLOCK_WORDS * blocks)
        end = k
        while end + _U16 < changed and np.uint64(positions[end + _U16]) < stop:
            end += _U16
        while end < changed and np.uint64(positions[end]) < stop:
            end += _U1
        for j in range(k, end):
            inside = np.uint64(positions[j]) - begin
            b, bit = inside >> _U6, inside & _U63
            q = b * _U4
            p0, p1, p2, p3 = planes[q], planes[q + _U1], planes[q + _U2], planes[q + _U3]
            c0, c1, c2, c3 = (p0 >> bit) & _U1, (p1 >> bit) & _U1, (p2 >> bit) & _U1, (p3 >> bit) & _U1
            c = c0 | (c1 << _U1) | (c2 << _U2) | (c3 << _U3)
            members = (p0 ^ (c0 - _U1)) & (p1 ^ (c1 - _U1)) & (p2 ^ (c2 - _U1)) & (p3 ^ (c3 - _U1))
            here = ranks[b * _U16 + c] + np.uint32(_count(members & ((_U1 << bit) - _U1)))
            gaps[j] = here - last[c]
            classes[j] = np.uint8(c)
            last[c] = here + np.uint32(1)
        k = end
        for c in range(CLASSES):
            ranks[c] = ranks[CLASSES * blocks + c]
        at += BLOCK_WORDS * blocks
    return k


@_kernel
def unrank(  # type: ignore[no-untyped-def]
    words,
    lanes_row,
    place,
    valid,
    gaps,
    ends,
    shift,
    base,
    top,
    ranks,
    cursor,
    ahead,
    positions,
    olds,
    found,
    first,
    seed,
    table,
    audit,
):
    """The way back. ``gaps`` stand class by class, those of class c end before ``ends[c]``; fills ``positions`` and the words there (``olds``).

    ``words`` are whole blocks, the first of which is word ``place`` of the cell; of the last block, those in ``valid`` count. ``ranks`` (row 0), ``cursor``
    and ``ahead`` (the rank of each class's next change) carry on from one call to the next, ``found`` counts what is placed. With ``audit`` the digest of
    the words is taken on the way: ``lanes_row`` is the memory of those that count, ``first`` the number of the first in its tensor.
    Returns (found, digest).
    """
    planes = np.empty(4 * STRETCH_BLOCKS, np.uint64)
    hits = np.zeros(STRETCH_BLOCKS, np.uint64)
    lanes = _lanes(words)
    room = np.uint64(positions.size)
    placed = np.uint64(found)
    held = np.uint64(0)
    at = 0
    taken = 0
    while at < words.size and (audit or placed < room):
        blocks = min(STRETCH_BLOCKS, (words.size - at) >> 6)
        if audit:
            until = min((at + BLOCK_WORDS * blocks) * lanes, lanes_row.size)
            while taken < until:
                lane = first * lanes + taken
                begin = lane & 1023
                count = min(1024 - begin, until - taken)
                held += _block_sum(lanes_row[taken : taken + count], table[begin : begin + count]) * multiplier(seed, lane >> 10)
                taken += count
        survey(words, np.uint64(at), blocks, shift, base, top, planes, ranks)
        # A search for a rank must not end behind the last block.
        for spare in range(CLASSES * (blocks + 1), CLASSES * (STRETCH_BLOCKS + 1)):
            ranks[spare] = np.uint32(0xFFFFFFFF)
        for number in range(top + 1):
            c = np.uint64(number)
            reach = np.uint64(ranks[np.uint64(CLASSES * blocks) + c])
            k, end, rank_ahead = cursor[c], np.uint64(ends[c]), ahead[c]
            while rank_ahead < reach:
                target = np.uint32(rank_ahead)
                row = c
                row += np.uint64(ranks[row + np.uint64(512)] <= target) << _U9
                row += np.uint64(ranks[row + np.uint64(256)] <= target) << _U8
                row += np.uint64(ranks[row + np.uint64(128)] <= target) << _U7
                row += np.uint64(ranks[row + np.uint64(64)] <= target) << _U6
                row += np.uint64(ranks[row + np.uint64(32)] <= target) << _U5
                row += np.uint64(ranks[row + _U16] <= target) << _U4
                b = row >> _U4
                hits[b] |= _member(_members(planes, b, c), np.uint64(target - ranks[row]))
                k += _U1
                rank_ahead = rank_ahead + _U1 + np.uint64(gaps[k]) if k < end else _NEVER
            cursor[c] = k
            ahead[c] = rank_ahead
        if at + BLOCK_WORDS * blocks >= words.size:
            hits[blocks - 1] &= valid
        for block in range(blocks):
            bits = hits[block]
            hits[block] = _U0
            origin = np.uint64(at + BLOCK_WORDS * block)
            following = placed
            if placed + _U4 <= room:
                here = _count(bits)
                for step in range(4):
                    inside = origin + (_lowest(bits) & _U63)
                    positions[placed + np.uint64(step)] = np.uint32(np.uint64(place) + inside)
                    olds[placed + np.uint64(step)] = words[inside]
                    bits &= bits - _U1
                following = placed + _U4
                placed += here
                if not bits:
                    continue
            while bits and following < room:
                inside = origin + _lowest(bits)
                positions[following] = np.uint32(np.uint64(place) + inside)
                olds[following] = words[inside]
                bits &= bits - _U1
                following += _U1
            placed = following
        for kept in range(CLASSES):
            ranks[kept] = ranks[CLASSES * blocks + kept]
        at += BLOCK_WORDS * blocks
    return placed, held


@_kernel
def census(words, pace, shift, counts):  # type: ignore[no-untyped-def]
    """Counts levels in every ``pace``-th block of 64 words; a shorter end counts as a block. Returns how many words were looked at."""
    seen = 0
    spare = np.uint64(64 - 8 * words.itemsize)
    for block in range(0, (words.size + BLOCK_WORDS - 1) // BLOCK_WORDS, pace):
        end = min(BLOCK_WORDS * (block + 1), words.size)
        for k in range(BLOCK_WORDS * block, end):
            counts[level_of(words[k], spare, shift)] += 1
        seen += end - BLOCK_WORDS * block
    return seen


@_kernel
def _bits(ones, every):  # type: ignore[no-untyped-def]
    """What it takes to say which ``ones`` of ``every`` there are."""
    if ones <= 0.0 or ones >= every:
        return 0.0
    zeros = every - ones
    return -(ones * np.log2(ones / every)) - zeros * np.log2(zeros / every)


@_kernel
def cheapest(every, changed, class_bits, costs, bases):  # type: ignore[no-untyped-def]
    """For 1, 4, 8, 12 and 16 classes the least bits that positions take and the base of that window, given words and changes of each level."""
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
