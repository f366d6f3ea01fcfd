"""Joins parts of one cell, each coded as a separate cell, into the whole cell's coded change.

A trainer's ranks own ranges of cells (the rows of a shard), so several ranks may each send a part of one cell. Digests
are sums over words, so the parts' digests add up. If every part is ``flat``, positions and steps are concatenated and
encoded again; otherwise the cell is encoded from its joined words.

Guarantees: the result of ``join`` decodes to exactly the words that the parts state, and each part was coded against
exactly the current words. Each part's ``before`` is checked separately: in a sum of several, wrong steps on a wrong
base could go undetected. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import CODECS, DENSE_PAYS_FROM, FLAT, RAW, Encoded, Patch, decode, encode
from p2pcast.codec.digest import MASK, check_words, digest
from p2pcast.codec.flat_codec import encode_flat
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError, UsageError

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CellPart:
    """Words ``start`` … ``start + words`` of a cell, coded as the cell that ``within`` returns for them.

    ``before``: None if ``payload`` is the raw new words. ``sender``: the sending rank's name, for errors.
    """

    start: int
    words: int
    codec: int
    payload: bytes
    before: int | None
    after: int
    sender: str = "a part"

    @property
    def end(self) -> int:
        return self.start + self.words


def within(cell: Cell, start: int, words: int) -> Cell:
    """Return a range of a cell's words as a separate cell. Raises UsageError if it is empty or outside the cell."""
    if start < 0 or words < 1 or start + words > cell.words:
        raise UsageError(f"cell {cell.index}: words {start} to {start + words} are not a range of its {cell.words}")
    offset = cell.offset + start * cell.word_bytes
    return replace(cell, start=cell.start + start, words=words, offset=offset)


def join(cell: Cell, parts: Sequence[CellPart], old: Words, before: int, *, codec: str = "auto") -> Encoded | None:
    """Join disjoint parts into one coded cell; words in no part are unchanged. Returns None if no word changes.

    ``old``: the cell's words; ``before``: their digest; ``codec``: as for ``encode``. A part that covers the whole cell
    keeps its coding. Raises IntegrityError, with the sender and the words, if a part is malformed, was coded against
    different words, or does not reach its stated digest.
    """
    parts = sorted(parts, key=lambda p: p.start)
    if len(parts) == 1 and parts[0].words == cell.words and parts[0].before is not None:
        return _whole(cell, parts[0], old, before)
    for one, other in pairwise(parts):
        if one.end > other.start:
            raise IntegrityError(f"{_where(cell, other)}: words before {one.end} were already sent by {one.sender}")
    was = check_words(old, cell)
    patches = [(part.start, _patch(cell, part, was)) for part in parts]
    if codec != "dense" and all(part.codec == FLAT and part.before is not None for part in parts):
        joined = _flat(cell, patches, was, before)
        if joined is None or codec == "flat" or len(joined.payload) * DENSE_PAYS_FROM <= cell.nbytes:
            return joined
    new = was.copy()
    for start, patch in patches:
        target = new[start:]
        if patch.positions is None:
            target[: patch.words.size] = patch.words
        else:
            target[patch.positions] = patch.words
    return encode(cell, was, new, before=before, codec=codec)


def assemble(cell: Cell, parts: Sequence[CellPart]) -> Words:
    """Return all words of a cell from parts that state them (``before`` None).

    Raises IntegrityError if a part is malformed, or if a word is in no part or in two.
    """
    parts = sorted(parts, key=lambda p: p.start)
    at = 0
    for part in parts:
        if part.start != at or part.before is not None:
            break
        at = part.end
    if at != cell.words or not parts or parts[-1].end != at:
        raise IntegrityError(
            f"cell {cell.index}: words from {at} on are missing, repeated, or sent as a change without a base"
        )
    rows = [_stated(cell, part) for part in parts]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _whole(cell: Cell, part: CellPart, old: Words, before: int) -> Encoded | None:
    """Return the part as sent, after decoding it once: O(changed words). The staging reader audits current words."""
    assert part.before is not None
    if part.before != before:
        raise IntegrityError(
            f"{_where(cell, part)}: wrong base: the part was coded against digest {part.before:016x}, "
            f"the words here have digest {before:016x}"
        )
    patch = _decoded(cell, part, old, audit=False)
    if patch.changed == 0:
        return None
    return Encoded(cell.index, part.codec, part.payload, part.before, part.after, patch.changed)


def _patch(cell: Cell, part: CellPart, was: Words) -> Patch:
    """Return a part's change, verified from ``before`` to ``after``. Positions count from the part's start."""
    if part.before is None:
        words = _stated(cell, part)
        return Patch(cell.index, None, words, 0, part.after, words.size)
    return _decoded(cell, part, was[part.start : part.end], audit=True)


def _decoded(cell: Cell, part: CellPart, old: Words, *, audit: bool) -> Patch:
    assert part.before is not None
    if part.codec not in CODECS:
        raise IntegrityError(f"{_where(cell, part)}: codec {part.codec} is unknown to this p2pcast")
    try:
        return decode(
            within(cell, part.start, part.words),
            part.codec,
            part.payload,
            old,
            part.before,
            part.after,
            check_before=audit,
        )
    except IntegrityError as error:
        raise IntegrityError(f"{_where(cell, part)}: {error}") from None


def _stated(cell: Cell, part: CellPart) -> Words:
    sub = within(cell, part.start, part.words)
    if part.codec != RAW:
        raise IntegrityError(f"{_where(cell, part)}: a part without a digest of its old words must be raw")
    try:
        words = CODECS[RAW].decode(sub, part.payload, None, audit=False).words
    except IntegrityError as error:
        raise IntegrityError(f"{_where(cell, part)}: {error}") from None
    reached = digest(words, sub)
    if reached != part.after:
        raise IntegrityError(f"{_where(cell, part)}: the words have digest {reached:016x}, not {part.after:016x}")
    return words


def _flat(cell: Cell, patches: Sequence[tuple[int, Patch]], was: Words, before: int) -> Encoded | None:
    """Join patches that have positions into one ``flat`` cell."""
    places = [patch.positions + np.uint32(start) for start, patch in patches if patch.positions is not None]
    if not places:
        return None
    positions, words = np.concatenate(places), np.concatenate([patch.words for _, patch in patches])
    after = before + sum(patch.after - patch.before for _, patch in patches)
    payload = encode_flat(positions, words - was[positions], cell.words)
    return Encoded(cell.index, FLAT, payload, before, after & MASK, int(positions.size))


def _where(cell: Cell, part: CellPart) -> str:
    return f"{part.sender}: cell {cell.index}, words {part.start} to {part.end}"
