"""Squash: consecutive changes of one cell become one, exactly, without the base.

ULP steps are additive (mod 2^bits), so a chain of ``flat`` links adds up word by word and steps that cancel vanish. A ``dense`` or ``raw`` link
states every word, so from there on the result is absolute. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import CODEC_NAMES, DENSE, FLAT, RAW, DenseCodec, Encoded, RawCodec, encode_whole
from p2pcast.codec.digest import digest, word_dtype
from p2pcast.codec.flat import decode_flat, encode_flat
from p2pcast.codec.layout import Cell
from p2pcast.errors import IntegrityError, UsageError

_WHOLE: dict[int, RawCodec | DenseCodec] = {RAW: RawCodec(), DENSE: DenseCodec()}


def squash(cell: Cell, links: Sequence[tuple[int, bytes, int, int]]) -> Encoded | None:
    """Compose ``links``, each (codec, payload, before, after), oldest first; None when they cancel out.

    Raises IntegrityError for links that do not chain or are malformed, UsageError for a codec that can't be composed without the base
    (``context``). Where every link is ``flat``, ``changed`` is exact; else it is the whole cell.
    """
    if not links:
        raise UsageError(f"cell {cell.index}: nothing to squash")
    for k in range(1, len(links)):
        if links[k][2] != links[k - 1][3]:
            raise IntegrityError(
                f"cell {cell.index}: link {k} starts at digest {links[k][2]:016x}, link {k - 1} ends at {links[k - 1][3]:016x}"
            )
    before, after = links[0][2], links[-1][3]
    dtype = word_dtype(cell.word_bytes)
    total: npt.NDArray[Any] = np.zeros(cell.words, dtype=dtype)  # steps, or words once ``absolute``
    absolute = False
    for codec, payload, _, reached in links:
        if codec == FLAT:
            positions, steps = decode_flat(payload, cell)
            total[positions] += steps
        elif codec in _WHOLE:
            total = _WHOLE[codec].decode(cell, payload, None, audit=False).words.copy()
            absolute = True
        else:
            raise UsageError(f"cell {cell.index}: codec {CODEC_NAMES.get(codec, codec)} can't be squashed without the base")
        if absolute and digest(total, cell) != reached:
            raise IntegrityError(f"cell {cell.index}: a link does not lead to its digest {reached:016x}")
    if absolute:
        chosen, whole = encode_whole(total)
        assert whole is not None
        return Encoded(cell.index, chosen, whole, before, after, cell.words)
    moved = np.flatnonzero(total).astype(np.uint32)
    if moved.size == 0:
        if before != after:
            raise IntegrityError(f"cell {cell.index}: its steps cancel out, but its digests differ")
        return None
    return Encoded(cell.index, FLAT, encode_flat(moved, total[moved], cell.words), before, after, int(moved.size))
