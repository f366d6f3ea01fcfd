"""Ranks within classes: compiled loops that turn positions into ranks among the words of a class, and back.

A word's *level* is ((w << 1) >> shift), the leading bits of its magnitude. Its *class* is the level within a window:
min(max(level − base, 0), top). 64 words form a block. A block's classes are represented by four masks (*planes*), one
for each bit of the class. The members of a class are the AND of these masks, or their complements, and are counted by
popcount, so no loop runs over words. 64 blocks are surveyed before their changes are processed.

As in ``kernels``, arrays that are only read come through ``readonly``, and callers check arguments. A damaged payload
has bounded effects: ``unrank`` writes no more positions than fit its arrays, all inside the words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from p2pcast.codec.kernels import _count, _kernel, _lanes, _lowest, digest_part

CLASSES = 16
"""Most classes: four bits per word."""
BLOCK_WORDS = 64
STRETCH_BLOCKS = 64
"""Blocks surveyed at a time: few enough for the L1 cache, and enough for long loops over their changes."""
STRETCH_WORDS = BLOCK_WORDS * STRETCH_BLOCKS

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U3 = np.uint64(3)
_U6 = np.uint64(6)
_U7 = np.uint64(7)
_U16 = np.uint64(16)
_U63 = np.uint64(63)
_U64 = np.uint64(64)
_U128 = np.uint64(128)
_U192 = np.uint64(192)
_LAST = np.uint64(CLASSES * STRETCH_BLOCKS)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    """Return a vector that repeats ``value``, truncated to the elements' width."""
    if value.type.width > vector.element.width:
        value = builder.trunc(value, vector.element)
    empty, number = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    one = builder.insert_element(empty, value, ir.Constant(number, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(number, vector.count), [0] * vector.count))


def _classes(builder: Any, load: Any, shift: Any, base: Any, top: Any) -> Any:
    """Return the classes of 64 words, one byte each."""
    width, byte, word = load.type.element.width, ir.IntType(8), ir.IntType(64)
    narrow, one = ir.VectorType(byte, 64), ir.Constant(word, 1)
    level = builder.lshr(load, _splat(builder, builder.sub(shift, one), load.type))
    if width > 8:
        count = width // 8
        every = ir.VectorType(byte, 64 * count)
        picks = ir.Constant(ir.VectorType(ir.IntType(32), 64), [count * k for k in range(64)])
        level = builder.shuffle_vector(builder.bitcast(level, every), ir.Constant(every, ir.Undefined), picks)
    below_sign = builder.sub(builder.shl(one, builder.sub(ir.Constant(word, width), shift)), one)
    level = builder.and_(level, _splat(builder, below_sign, narrow))
    # This form lets the compiler emit a saturating subtraction and a minimum.
    lowest, highest = _splat(builder, base, narrow), _splat(builder, top, narrow)
    above = builder.select(
        builder.icmp_unsigned(">", level, lowest), builder.sub(level, lowest), ir.Constant(narrow, [0] * 64)
    )
    return builder.select(builder.icmp_unsigned("<", above, highest), above, highest)


def _fetch(builder: Any, place: Any, width: int) -> None:
    """Prefetch the 64 words at ``place``, which may be past the array's end, while earlier blocks are processed."""
    byte, number = ir.IntType(8), ir.IntType(32)
    name, kind = "llvm.prefetch.p0i8", ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
    fetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    first = builder.bitcast(place, byte.as_pointer())
    for line in range(width // 8):
        at = builder.gep(first, [ir.Constant(number, 64 * line)])
        builder.call(fetch, [at, *(ir.Constant(number, value) for value in (0, 2, 1))])


@intrinsic  # type: ignore[untyped-decorator]
def survey(
    _typing: Any, words: Any, at: Any, blocks: Any, shift: Any, base: Any, top: Any, planes: Any, ranks: Any
) -> Any:
    """Compute the planes and ranks of ``blocks`` blocks from word ``at`` on.

    Bit k of ``planes[64 j + i]`` is bit j of the class of word k in the block whose ``survey_slot`` is i. For classes c
    up to ``top``, ``ranks[64 c + i]`` (u16) is the number of members of class c in the blocks before that block, and
    ``ranks[1024 + c]`` the number in all 64 blocks.

    A vector covers eight blocks that are eight apart. So counts are added lane by lane, and the lanes only once, at the
    end.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, half, full = ir.IntType(64), ir.IntType(16), (1 << 64) - 1
        data, plane_row, rank_row = (
            arrayobj.make_array(signature.args[k])(context, builder, args[k]).data for k in (0, 6, 7)
        )
        shift, base, top = args[3:6]
        row = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), 64)
        narrow, masks, eight = ir.VectorType(ir.IntType(8), 64), ir.VectorType(word, 8), ir.VectorType(half, 8)
        every, picks = ir.VectorType(half, 64), ir.VectorType(ir.IntType(32), 64)

        def number(value: int) -> Any:
            return ir.Constant(word, value)

        def load(source: Any, at: Any, kind: Any, align: int) -> Any:
            found = builder.load(builder.bitcast(builder.gep(source, [at]), kind.as_pointer()))
            found.align = align
            return found

        def store(value: Any, target: Any, at: Any) -> None:
            place = builder.bitcast(builder.gep(target, [at]), value.type.as_pointer())
            builder.store(value, place).align = value.type.element.width // 8

        with cgutils.for_range(builder, args[2]) as loop:
            place = builder.add(args[1], builder.mul(loop.index, number(64)))
            _fetch(builder, builder.gep(data, [builder.add(place, number(STRETCH_WORDS))]), row.element.width)
            classes = _classes(builder, load(data, place, row, 1), shift, base, top)
            survey_slot = builder.or_(
                builder.shl(builder.and_(loop.index, number(7)), number(3)), builder.lshr(loop.index, number(3))
            )
            for bit in range(4):
                some = builder.and_(classes, ir.Constant(narrow, [1 << bit] * 64))
                plane = builder.bitcast(builder.icmp_unsigned("!=", some, ir.Constant(narrow, [0] * 64)), word)
                builder.store(plane, builder.gep(plane_row, [builder.add(survey_slot, number(64 * bit))]))
        name = "llvm.ctpop.v8i64"
        count = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(masks, [masks]), name)
        running = [cgutils.alloca_once_value(builder, ir.Constant(masks, [0] * 8)) for _ in range(CLASSES)]
        with cgutils.for_range(builder, number(8)) as loop:
            first = builder.mul(loop.index, number(8))
            spread = [load(plane_row, builder.add(first, number(64 * bit)), masks, 8) for bit in range(4)]
            without = [builder.xor(plane, ir.Constant(masks, [full] * 8)) for plane in spread]
            pairs = [
                [
                    builder.and_((spread if c & 1 else without)[bit], (spread if c & 2 else without)[bit + 1])
                    for c in range(4)
                ]
                for bit in (0, 2)
            ]
            for four in range(CLASSES // 4):
                with builder.if_then(builder.icmp_signed(">=", top, number(4 * four))):
                    for c in range(4 * four, 4 * four + 4):
                        before = builder.load(running[c])
                        store(builder.trunc(before, eight), rank_row, builder.add(first, number(64 * c)))
                        members = builder.and_(pairs[0][c & 3], pairs[1][four])
                        builder.store(builder.add(before, builder.call(count, [members])), running[c])
        none = ir.Constant(eight, [0] * 8)
        for c in range(CLASSES):
            with builder.if_then(builder.icmp_signed(">=", top, number(c))):
                lanes = builder.trunc(builder.load(running[c]), eight)
                upto = lanes
                for step in (1, 2, 4):
                    up = ir.Constant(
                        ir.VectorType(ir.IntType(32), 8), [lane - step if lane >= step else 8 for lane in range(8)]
                    )
                    upto = builder.add(upto, builder.shuffle_vector(upto, none, up))
                builder.store(
                    builder.extract_element(upto, ir.Constant(ir.IntType(32), 7)),
                    builder.gep(rank_row, [number(64 * CLASSES + c)]),
                )
                again = ir.Constant(picks, [k % 8 for k in range(64)])
                ahead = builder.shuffle_vector(builder.sub(upto, lanes), none, again)
                store(builder.add(load(rank_row, number(64 * c), every, 2), ahead), rank_row, number(64 * c))
        return context.get_dummy_value()

    return types.void(words, types.uint64, types.int64, types.int64, types.int64, types.int64, planes, ranks), generate


@intrinsic  # type: ignore[untyped-decorator]
def _not_above(_typing: Any, ranks: Any, at: Any, rank: Any) -> Any:
    """Return how many of the 64 numbers from ``ranks[at]`` on are at most ``rank``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, word = ir.VectorType(ir.IntType(16), 64), ir.IntType(64)
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [args[1]]), row.as_pointer()))
        found.align = 2
        return builder.ctpop(builder.bitcast(builder.icmp_unsigned("<=", found, _splat(builder, args[2], row)), word))

    return types.uint64(ranks, types.uint64, types.uint64), generate


@_kernel
def survey_slot(block):  # type: ignore[no-untyped-def]
    """Return the index in a survey's arrays for a block, which is given by its number in the stretch."""
    return ((block & _U7) << _U3) | (block >> _U3)


@_kernel
def _add_survey(ranks, blocks, top, bases):  # type: ignore[no-untyped-def]
    """Add the survey's class counts to the running totals."""
    for number in range(top + 1):
        c = np.uint64(number)
        whole = blocks == STRETCH_BLOCKS
        bases[c] += np.uint32(ranks[_LAST + c if whole else (c << _U6) + survey_slot(np.uint64(blocks))])


@intrinsic  # type: ignore[untyped-decorator]
def _deposit(_typing: Any, bits: Any, mask: Any) -> Any:
    """Return the low bits of ``bits``, placed in order at the ones of ``mask`` (x86's PDEP)."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        name = "llvm.x86.bmi.pdep.64"
        known = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(word, [word, word]), name
        )
        return builder.call(known, args)

    return types.uint64(types.uint64, types.uint64), generate


def _has_deposit() -> bool:
    return binding.get_default_triple().startswith("x86_64") and bool(binding.get_host_cpu_features().get("bmi2"))


if _has_deposit():

    @_kernel
    def _nth_member(mask, number):  # type: ignore[no-untyped-def]
        """The set bit ``number`` (from 0) of ``mask``; 0 if ``mask`` has fewer."""
        return _deposit(_U1 << number, mask)

else:

    @_kernel
    def _nth_member(mask, number):  # type: ignore[no-untyped-def]
        """The set bit ``number`` (from 0) of ``mask``; 0 if ``mask`` has fewer."""
        for _ in range(number):
            mask &= mask - _U1
        return mask & (~mask + _U1)


@_kernel
def level_of(word, spare, shift):  # type: ignore[no-untyped-def]
    """Return a word's level (u64). ``spare``: 64 minus the word's bits. ``shift`` must leave levels of at most 255."""
    return ((np.uint64(word) << (spare + _U1)) >> spare) >> np.uint64(shift)


@_kernel
def _members(planes, i, c):  # type: ignore[no-untyped-def]
    """Return the mask of the members of class c in the block with survey slot i."""
    found = planes[i] ^ ((c & _U1) - _U1)
    found &= planes[i + _U64] ^ (((c >> _U1) & _U1) - _U1)
    found &= planes[i + _U128] ^ (((c >> _U2) & _U1) - _U1)
    return found & (planes[i + _U192] ^ (((c >> _U3) & _U1) - _U1))


@_kernel
def describe_changes(held, steps, shift, levels, ups, sizes, counts, large):  # type: ignore[no-untyped-def]
    """Fill ``levels``, ``ups`` and ``sizes`` for each changed word. Bit 0 of ``ups`` is whether the value increases,
    bit 1 is the old value's sign; sizes are those of steps.

    ``counts[level]`` is incremented, and ``large[level]`` is set if a size is not 1.
    """
    bits = np.uint64(8 * held.itemsize)
    spare = _U64 - bits
    four = np.zeros(4 * 256, np.uint32)
    for k in range(held.size):
        word = np.uint64(held[k])
        step = np.uint64(steps[k])
        level = level_of(word, spare, shift)
        down = step >> (bits - _U1)
        size = ((step ^ (_U0 - down)) + down) & (~_U0 >> spare)
        levels[k] = np.uint8(level)
        sign = word >> (bits - _U1)
        ups[k] = np.uint8((down ^ _U1 ^ sign) | sign << _U1)
        sizes[k] = size
        # Use four tables: with one, each increment would wait for the previous store.
        four[(np.uint64(k) & _U3) * np.uint64(256) + level] += np.uint32(1)
        large[level] |= np.uint8(size != _U1)
    for level in range(256):
        counts[level] += four[level] + four[level + 256] + four[level + 512] + four[level + 768]


@_kernel
def rank(words, place, positions, levels, first, coarse, shift, base, top, bases, cursor, found):  # type: ignore[no-untyped-def]
    """Find each position's rank among the words of its class; ``found`` lists the ranks class by class.

    ``words``: whole blocks, starting at word ``place`` of the cell. Positions are processed from index ``first`` on.
    ``coarse``: how many low bits of ``levels`` the class ignores. ``bases`` (members of each class so far) and
    ``cursor`` (index in ``found`` of each class's next rank) carry state between calls. Returns the index of the next
    position.
    """
    planes, ranks = np.zeros(4 * STRETCH_BLOCKS, np.uint64), np.empty(CLASSES * (STRETCH_BLOCKS + 1), np.uint16)
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
            i, bit = survey_slot(inside >> _U6), inside & _U63
            c = np.uint64(min(max((np.int64(levels[j]) >> coarse) - base, 0), top))
            before = _members(planes, i, c) & ((_U1 << bit) - _U1)
            found[cursor[c]] = bases[c] + np.uint32(ranks[(c << _U6) + i]) + np.uint32(_count(before))
            cursor[c] += _U1
        k = end
        _add_survey(ranks, blocks, top, bases)
        at += BLOCK_WORDS * blocks
    return k


@_kernel
def _mark_hits(found, hits, planes, ranks, bases, reaches, top, cursor):  # type: ignore[no-untyped-def]
    """Set in ``hits`` the bits of the words with the ranks in ``found``, within the surveyed blocks.

    For class c, these are the ranks from ``bases[c]`` to ``reaches[c]``. ``cursor``: index in ``found`` of each class's
    next rank. Each class ends with a rank that no word can have.
    """
    for number in range(top + 1):
        c = np.uint64(number)
        base, reach, row = np.uint64(bases[c]), np.uint64(reaches[c]), c << _U6
        k = cursor[c]
        target = np.uint64(found[k])
        while target < reach:
            inside = target - base
            b = _not_above(ranks, row, inside) - _U1
            i = survey_slot(b)
            hits[b] |= _nth_member(_members(planes, i, c), inside - np.uint64(ranks[row + i]))
            k += _U1
            target = np.uint64(found[k])
        cursor[c] = k


@_kernel
def unrank(  # type: ignore[no-untyped-def]
    words,
    lanes_row,
    place,
    valid,
    ranked,
    shift,
    base,
    top,
    bases,
    cursor,
    positions,
    olds,
    found,
    first,
    seed,
    table,
    audit,
):
    """Undo ``rank``: fill ``positions`` and the words there (``olds``).

    ``ranked``: ascending ranks class by class, each class followed by 2³² − 1. ``positions`` has two elements more than
    there are ranks. ``words``: whole blocks, starting at word ``place`` of the cell; in the last block, only the words
    in the mask ``valid`` count. ``bases`` (members of each class so far) and ``cursor`` (index of each class's next
    rank) carry state between calls; ``found`` is the number of positions filled so far.

    With ``audit``, the digest of the words is computed in the same pass. ``lanes_row``: the memory of the words that
    count; ``first``: the number of the first of them in its tensor. Returns (found, digest).
    """
    planes, ranks = np.zeros(4 * STRETCH_BLOCKS, np.uint64), np.empty(CLASSES * (STRETCH_BLOCKS + 1), np.uint16)
    reaches = bases.copy()
    hits = np.zeros(STRETCH_BLOCKS, np.uint64)
    lanes = _lanes(words)
    room = np.uint64(olds.size)
    placed = np.uint64(found)
    held = np.uint64(0)
    at = 0
    taken = 0
    while at < words.size and (audit or placed < room):
        blocks = min(STRETCH_BLOCKS, (words.size - at) >> 6)
        if audit:
            until = min((at + BLOCK_WORDS * blocks) * lanes, lanes_row.size)
            held += digest_part(lanes_row, taken, until, first * lanes, seed, table)
            taken = until
        survey(words, np.uint64(at), blocks, shift, base, top, planes, ranks)
        _add_survey(ranks, blocks, top, reaches)
        _mark_hits(ranked, hits, planes, ranks, bases, reaches, top, cursor)
        if at + BLOCK_WORDS * blocks >= words.size:
            hits[blocks - 1] &= valid
        earlier = placed
        for number in range(blocks):
            block = np.uint64(number)
            bits = hits[block]
            hits[block] = _U0
            origin = np.uint64(place + at) + (block << _U6)
            # Always write two positions: a loop over the set bits would mispredict its end.
            following = placed + _count(bits)
            positions[placed] = np.uint32(origin + (_lowest(bits) & _U63))
            bits &= bits - _U1
            positions[placed + _U1] = np.uint32(origin + (_lowest(bits) & _U63))
            bits &= bits - _U1
            placed += _U2
            while bits:
                positions[placed] = np.uint32(origin + _lowest(bits))
                bits &= bits - _U1
                placed += _U1
            placed = following
        for k in range(earlier, placed):
            olds[k] = words[np.uint64(positions[k]) - np.uint64(place)]
        bases[:] = reaches
        at += BLOCK_WORDS * blocks
    return placed, held
