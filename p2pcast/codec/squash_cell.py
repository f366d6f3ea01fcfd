"""Squashes consecutive changes of one cell into one exact change, without the base if the links allow it.

Steps in ULPs are additive (mod 2^bits), so ``flat`` links are merged in one pass: steps are summed by position, and a
bitmap records the positions. Then the non-zero sums are read in order; steps that cancel out disappear. This takes
O(changes), regardless of the cell's size. A ``dense`` or ``raw`` link states every word, so links before the last such
link are ignored, and later ones are applied to its words. A ``context`` link needs the words before it, so a chain that
begins with one needs the base. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import CODEC_NAMES, CONTEXT, DENSE, FLAT, RAW, Encoded, apply, decode, encode, encode_whole
from p2pcast.codec.digest import digest, word_dtype
from p2pcast.codec.flat_codec import decode_flat, encode_flat
from p2pcast.codec.kernels import _kernel, _lowest, readonly
from p2pcast.codec.layout import Cell
from p2pcast.codec.scratch import ScratchBuffers
from p2pcast.ground.errors import IntegrityError, UsageError

Words = npt.NDArray[Any]
Link = tuple[int, bytes, int, int]
"""Codec, payload, digest before, digest after."""

_WHOLE = frozenset({DENSE, RAW})
_U0, _U1, _U6, _U63, _U64 = (np.uint64(n) for n in (0, 1, 6, 63, 64))

_room = ScratchBuffers()


def needs_base(codecs: Iterable[int]) -> bool:
    """Whether squashing links of these codecs needs the words before the first link."""
    found = set(codecs)
    return not found & _WHOLE and not found <= {FLAT}


def squash(cell: Cell, links: Sequence[Link], *, base: Words | None = None, codec: str = "auto") -> Encoded | None:
    """Combine ``links``, oldest first, into one change. Returns None if they cancel out.

    ``base``: the cell's words before the first link; if given, its digest and the chain's result are verified.
    ``codec``: the result's codec; ``auto`` means ``context`` if any link is ``context``, otherwise the smallest. Any
    other codec needs the base.

    Raises IntegrityError if the links are malformed or do not form a chain, or if the base is wrong. Raises UsageError
    if the base is needed and missing. The result's ``changed`` is exact, unless a link states every word and there is
    no base: then it counts the whole cell.
    """
    if not links:
        raise UsageError(f"cell {cell.index}: nothing to squash")
    for k in range(1, len(links)):
        if links[k][2] != links[k - 1][3]:
            raise IntegrityError(
                f"cell {cell.index}: link {k} starts at digest {links[k][2]:016x}, "
                f"link {k - 1} ends at {links[k - 1][3]:016x}"
            )
    codecs = [link[0] for link in links]
    if base is None and (codec != "auto" or needs_base(codecs)):
        needing = next((c for c in codecs if c != FLAT), FLAT)
        limitation = (
            f"codec {CODEC_NAMES.get(needing, needing)} can't be squashed"
            if codec == "auto"
            else f"a squash can't be coded as {codec}"
        )
        raise UsageError(f"cell {cell.index}: {limitation} without the base")
    if codec in ("auto", "flat") and set(codecs) == {FLAT}:
        coded = _merge_flat(cell, links)
        if base is not None:
            _check_base(cell, base, links[0][2])
            if coded is not None:
                decode(cell, coded.codec, coded.payload, base, coded.before, coded.after, check_before=False)
        return coded
    words = _replay(cell, links, base)
    if base is None:
        chosen, payload = encode_whole(words)
        assert payload is not None
        return Encoded(cell.index, chosen, payload, links[0][2], links[-1][3], cell.words)
    if codec == "auto" and CONTEXT in codecs:
        codec = "context"
    coded = encode(cell, base, words, before=links[0][2], codec=codec)
    if coded is not None and len(coded.payload) > cell.nbytes:
        coded = encode(cell, base, words, before=links[0][2], codec="raw")
    return coded


def _check_base(cell: Cell, base: Words, before: int) -> None:
    held = digest(base, cell)
    if held != before:
        raise IntegrityError(
            f"cell {cell.index}: wrong base: its words have digest {held:016x}, the first link is against {before:016x}"
        )


def _replay(cell: Cell, links: Sequence[Link], base: Words | None) -> Words:
    """Return the cell's words after the last link, replayed from the last one that states all words, or ``base``."""
    if base is not None:
        _check_base(cell, base, links[0][2])
    whole = max((k for k, link in enumerate(links) if link[0] in _WHOLE), default=-1)
    if whole < 0:
        assert base is not None
        words = base.copy()
    else:
        words = decode(cell, links[whole][0], links[whole][1], None, *links[whole][2:]).words.copy()
    for codec, payload, before, after in links[whole + 1 :]:
        apply(decode(cell, codec, payload, words, before, after, check_before=False), words)
    return words


def _merge_flat(cell: Cell, links: Sequence[Link]) -> Encoded | None:
    """Merge links that are all ``flat``."""
    before, after = links[0][2], links[-1][3]
    total = _room.array(f"total{cell.word_bytes}", cell.words, word_dtype(cell.word_bytes), zeros=True)
    touched = _room.array("touched", (cell.words + 63) // 64, np.uint64, zeros=True)
    most = 0
    try:
        for _, payload, _, _ in links:
            positions, steps = decode_flat(payload, cell)
            _add(readonly(positions), readonly(steps), total, touched)
            most += positions.size
    except BaseException:
        total[:], touched[:] = 0, 0
        raise
    most = min(most, cell.words)
    moved, by = _room.array("moved", most, np.uint32), _room.array(f"by{cell.word_bytes}", most, total.dtype)
    count = int(_take(total, touched, moved, by))
    if count == 0:
        if before != after:
            raise IntegrityError(f"cell {cell.index}: its steps cancel out, but its digests differ")
        return None
    return Encoded(cell.index, FLAT, encode_flat(moved[:count], by[:count], cell.words), before, after, count)


@_kernel
def _add(positions, steps, total, touched):  # type: ignore[no-untyped-def]
    """Add steps at their positions and mark these in the bitmap. Positions are distinct and inside the cell."""
    for k in range(positions.size):
        p = np.uint64(positions[k])
        total[p] += steps[k]
        touched[p >> _U6] |= _U1 << (p & _U63)


@_kernel
def _take(total, touched, positions, steps):  # type: ignore[no-untyped-def]
    """Move the non-zero sums, in order, to ``positions`` and ``steps`` and clear both source arrays. Returns their
    number.
    """
    found = _U0
    for block in range(touched.size):
        bits = touched[block]
        if bits:
            touched[block] = _U0
            origin = _U64 * np.uint64(block)
            while bits:
                p = origin + _lowest(bits)
                bits &= bits - _U1
                step = total[p]
                if step:
                    total[p] = 0
                    positions[found] = np.uint32(p)
                    steps[found] = step
                    found += _U1
    return found
