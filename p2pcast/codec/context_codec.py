"""Codec ``context`` (docs/formats/delta-format.md §3): codes changed words' positions and steps relative to the old
words.

Whether a word changes depends on its magnitude: an optimiser step is many ULPs of a small weight, but a fraction of an
ULP of a large one. So positions are coded as gaps between changed members of one class (``class_ranks``), and each
class has its own geometric model (``gap_entropy_coder``). A step is coded as a direction and a size
(``step_entropy_coder``). Decoding needs the old words, even for positions.

Guarantees: a payload either decodes to what was encoded or raises IntegrityError. A decoder allocates at most a few
times the cell's size, whatever a payload claims, and by construction reads and writes only inside its arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec import class_ranks, class_window, gap_entropy_coder, kernels, step_entropy_coder
from p2pcast.codec.dense_codec import Buffer
from p2pcast.codec.digest import TABLE, lanes_of, seed, word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.codec.scratch import ScratchBuffers
from p2pcast.ground.errors import IntegrityError

VERSION = 1
MAX_ROW_WORDS = 1 << 20
"""Longest row, in words, whose columns have separate contexts; a context takes one byte."""
SHIFTS = {1: (3, 4), 2: (8, 11), 4: (24,), 8: (56,)}
"""Word width in bytes → allowed shifts of a level.

They suit e5m2 and e4m3 (1 byte), bf16 and f16 (2) and f32 (4). Of an 8-byte word, 8 bits below the sign are kept.
"""
SURVEYED_WORDS = 1 << 14
"""Number of words examined to choose classes; in a larger cell, blocks are sampled evenly."""
CLASS_COST_BITS = 24.0
"""Bits that one more class costs in the header."""
CLASS_SAVING = 0.0025
"""Share of the bits that four more classes must save at least, because they cost time."""
DIRECTION_SHARE = 0.95
"""Directions are coded in context if that takes less than this share of a bit per direction. A smaller saving is not
worth the time.
"""
SAMPLED_CHANGES = 1 << 12
"""Number of changes examined to decide whether directions are coded in context. The sample is consecutive, because
contexts adapt to earlier changes.
"""

_IN_CONTEXT = 1
_SIGNS_APART = 2
_FLAGS = (0, _IN_CONTEXT, _IN_CONTEXT | _SIGNS_APART)
_FIXED = 10

Words = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Window:
    """The window of levels that have separate classes; see ``class_ranks``."""

    shift: int
    base: int
    top: int


_room = ScratchBuffers()


def _blocks(words: Words) -> list[tuple[int, Words, int]]:
    """Split the cell, padded with zeros, into (place, whole blocks, number of words that count)."""
    whole = words.size & ~(class_ranks.BLOCK_WORDS - 1)
    parts = [(0, kernels.readonly(words[:whole]), whole)] if whole else []
    if whole < words.size:
        rest = np.zeros(class_ranks.BLOCK_WORDS, words.dtype)
        rest[: words.size - whole] = words[whole:]
        parts.append((whole, kernels.readonly(rest), words.size - whole))
    return parts


def census_stride(words: int) -> int:
    """Return the distance between the blocks of 64 words that a census of a cell of this size examines."""
    return max(1, words // SURVEYED_WORDS)


def choose_window(
    cell: Cell, counts: npt.NDArray[np.int64], changed: npt.NDArray[np.int64]
) -> tuple[Window, npt.NDArray[np.int64]]:
    """Return the window with the cheapest positions, estimated from a census, and the cumulative number of changed
    words per class.

    Both arrays have 256 levels of the finest shift. ``counts``: words in every ``census_stride``-th block; ``changed``:
    all changed words.
    """
    shifts = SHIFTS[cell.word_bytes]
    widths = np.array([1 << (shift - shifts[0]) for shift in shifts])
    ends = np.empty(class_ranks.CLASSES, np.int64)
    scale = cell.words / int(counts.sum())
    which, base, top = class_window.choose_window(counts, scale, widths, changed, CLASS_COST_BITS, CLASS_SAVING, ends)
    return Window(shifts[which], int(base), int(top)), ends[: top + 1]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    """Reads a payload's header and streams in order. Raises IntegrityError if it is too short or a number is out of
    range.
    """

    def __init__(self, view: memoryview, at: int, where: str) -> None:
        self.view, self.at, self.where = view, at, where

    def byte(self) -> int:
        if self.at >= len(self.view):
            raise IntegrityError(f"{self.where}: the payload ends inside its header")
        self.at += 1
        return self.view[self.at - 1]

    def varint(self, most: int) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if value > most or (byte == 0 and shift > 7):
                raise IntegrityError(f"{self.where}: a number in its header is out of range")
            if byte < 128:
                return value

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        if size > len(self.view) - self.at:
            raise IntegrityError(f"{self.where}: the payload ends inside its streams")
        self.at += size
        return np.frombuffer(self.view, np.uint8, size, self.at - size) if size else np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class ChangedWords:
    """Properties of the changed words, in order of position: levels at the finest shift, directions, and sizes of
    steps.

    ``counts``: changed words per level. ``large``: levels with a size other than 1. Valid until the thread's next call.
    """

    positions: Positions
    levels: npt.NDArray[np.uint8]
    ups: npt.NDArray[np.uint8]
    sizes: Words
    counts: npt.NDArray[np.int64]
    large: npt.NDArray[np.uint8]


def describe_changes(cell: Cell, positions: Positions, held: Words, steps: Words) -> ChangedWords:
    """Describe the words ``held`` at ``positions`` (ascending, at least one), which move by ``steps`` (unsigned, none
    zero).
    """
    ro, count = kernels.readonly, positions.size
    levels, ups = _room.array("levels", count, np.uint8), _room.array("ups", count, np.uint8)
    sizes, moved, large = _room.array("sizes", count, steps.dtype), np.zeros(256, np.int64), np.zeros(256, np.uint8)
    class_ranks.describe_changes(ro(held), ro(steps), SHIFTS[cell.word_bytes][0], levels, ups, sizes, moved, large)
    return ChangedWords(ro(positions), levels, ups, sizes, moved, large)


def encode_context(cell: Cell, old: Words, positions: Positions, steps: Words, held: Words | None = None) -> bytes:
    """Encode a cell whose words at ``positions`` (ascending, at least one) move by ``steps`` (unsigned, none zero).

    ``held``: the old words at ``positions``, if known. This function computes the census and the ranks on the host.
    ``device.device_context`` computes both on a device and calls ``encode_payload``.
    """
    old = kernels.readonly(old)
    changes = describe_changes(cell, positions, old[positions] if held is None else held, steps)
    counts = np.zeros(256, np.int64)
    class_window.census(old, census_stride(cell.words), SHIFTS[cell.word_bytes][0], counts)
    window, ends = choose_window(cell, counts, changes.counts)
    return encode_payload(cell, changes, window, ends, _rank_changes(cell, old, changes, window, ends))


def _rank_changes(cell: Cell, old: Words, changes: ChangedWords, window: Window, ends: Words) -> npt.NDArray[np.uint32]:
    """Return the changed words' ranks in their classes, class by class."""
    found, cursor = _room.array("ranked", changes.positions.size, np.uint32), np.zeros(class_ranks.CLASSES, np.uint64)
    cursor[1 : ends.size] = ends[:-1]
    bases, levels = np.zeros(class_ranks.CLASSES, np.uint32), kernels.readonly(changes.levels)
    coarse = window.shift - SHIFTS[cell.word_bytes][0]
    k = 0
    for place, words, _ in _blocks(old):
        k = class_ranks.rank(
            words,
            place,
            changes.positions,
            levels,
            k,
            coarse,
            window.shift,
            window.base,
            window.top,
            bases,
            cursor,
            found,
        )
    return found


def encode_payload(
    cell: Cell, changes: ChangedWords, window: Window, ends: Words, ranked: npt.NDArray[np.uint32]
) -> bytes:
    """Return the payload. ``ranked``: each changed word's rank in its class, class by class, in order of position;
    ``ends``: as returned by ``choose_window``.
    """
    ro, count = kernels.readonly, changes.positions.size
    ranked, means = ro(ranked), np.zeros(ends.size, np.int64)
    gap_entropy_coder.fit_models(ranked, ends, means)
    symbols, words16 = _room.array("symbols", count, np.uint8), _room.array("words", count + 2, np.uint16)
    raw = _room.array("raw", 10 * count + gap_entropy_coder.SPARE_BYTES, np.uint8)
    *states, begin, used = gap_entropy_coder.pack_gaps(
        ranked, ends, means, gap_entropy_coder.STARTS, gap_entropy_coder.LOW_BITS, symbols, words16, raw
    )
    flags, directions = _encode_directions(cell, changes.positions, changes.ups)
    coded_contexts, coded_sizes = _encode_sizes(cell, changes, window)
    head = [
        bytes((VERSION, cell.word_bytes, window.shift, window.base, window.top, flags)),
        coded_contexts.to_bytes(4, "little"),
    ]
    head.append(_varint(count))
    if flags & _IN_CONTEXT:
        head.append(_varint(_row_words(cell)))
    start = 0
    for c in range(ends.size):
        head.append(_varint(int(ends[c]) - start))
        if ends[c] > start:
            head.append(bytes((int(means[c]),)))
        start = int(ends[c])
    head += [_varint(words16.size - begin), _varint(used), _varint(len(directions))]
    head += [int(state).to_bytes(4, "little") for state in states]
    return b"".join([*head, words16[begin:].tobytes(), raw[:used].tobytes(), directions, coded_sizes])


def _encode_sizes(cell: Cell, changes: ChangedWords, window: Window) -> tuple[int, bytes]:
    """Return (mask of coded contexts, coded sizes)."""
    levels, coarse, highest = changes.levels, window.shift - SHIFTS[cell.word_bytes][0], window.base + window.top
    coded_contexts = 0
    for level in np.flatnonzero(changes.large).tolist():
        coded_contexts |= 1 << min(max(highest - (level >> coarse), 0), step_entropy_coder.LEVEL_CONTEXTS - 1)
    if not coded_contexts:
        return 0, b""
    ro, count = kernels.readonly, levels.size
    listed = _room.array("listed", count + 1, np.uint32)
    if coarse:
        levels = np.right_shift(levels, np.uint8(coarse), out=_room.array("coarse", count, np.uint8))
    found = step_entropy_coder.list_coded_sizes(ro(levels), highest, np.uint64(coded_contexts), listed)
    out = _room.array("said", int(found) * (4 * cell.word_bytes + 4) + 16, np.uint8)
    coded_sizes = step_entropy_coder.pack_sizes(
        ro(changes.sizes), ro(levels), ro(listed[:found]), highest, 8 * cell.word_bytes, out
    )
    return coded_contexts, out[:coded_sizes].tobytes()


def _row_words(cell: Cell) -> int:
    return cell.row_words if 0 < cell.row_words <= MAX_ROW_WORDS else 1


def _encode_directions(cell: Cell, positions: Positions, ups: npt.NDArray[np.uint8]) -> tuple[int, bytes]:
    """Return (flags, coded directions).

    Directions are coded in context if that takes clearly less than a bit each, with separate contexts for the old
    words' signs if that takes less still.
    """
    row_words, ro = _row_words(cell), kernels.readonly
    columns = _room.array("columns", row_words, np.uint8, zeros=True)
    middle = slice(max(0, (ups.size - SAMPLED_CHANGES) // 2), (ups.size + SAMPLED_CHANGES) // 2)
    sampled_positions, sampled_ups = positions[middle], ups[middle]
    together, apart = step_entropy_coder.direction_bits(
        ro(sampled_positions), ro(sampled_ups), ups.size / sampled_ups.size, cell.start, row_words, columns
    )
    if min(together, apart) <= DIRECTION_SHARE * ups.size:
        signs_apart = int(apart < 0.99 * together)
        out = _room.array("directions", 2 * ups.size + 16, np.uint8)
        used = step_entropy_coder.pack_directions(
            ro(positions), ro(ups), signs_apart, cell.start, row_words, columns, out
        )
        if used < ups.size / 8:
            return _IN_CONTEXT | (_SIGNS_APART if signs_apart else 0), out[:used].tobytes()
    return 0, np.packbits(ups & np.uint8(1), bitorder="little").tobytes()


def decode_context(
    payload: Buffer, cell: Cell, old: Words, *, audit: bool
) -> tuple[Positions, Words, Words, int | None]:
    """Return (positions, old words there, steps, digest of ``old`` if ``audit``). Raises IntegrityError."""
    where = f"cell {cell.index}: context payload"
    view = memoryview(payload).cast("B")
    if len(view) < _FIXED:
        raise IntegrityError(f"{where}: {len(view)} bytes are too few for its header of {_FIXED}")
    version, width, shift, base, top, flags = view[:6]
    coded_contexts = int.from_bytes(view[6:10], "little")
    if version != VERSION:
        raise IntegrityError(f"{where}: version {version}; this p2pcast reads version {VERSION}")
    if width != cell.word_bytes or shift not in SHIFTS[width] or top >= class_ranks.CLASSES or flags not in _FLAGS:
        raise IntegrityError(f"{where}: its header does not fit a cell of {cell.word_bytes}-byte words")
    reader = _Reader(view, _FIXED, where)
    changed = reader.varint(cell.words)
    row_words = reader.varint(MAX_ROW_WORDS) if flags & _IN_CONTEXT else 0
    if not changed or (flags & _IN_CONTEXT and not row_words):
        raise IntegrityError(f"{where}: it has no changes, or rows of zero words")
    ends, means = np.zeros(top + 1, np.int64), np.zeros(top + 1, np.int64)
    total = 0
    for c in range(top + 1):
        members = reader.varint(changed - total)
        model = reader.byte() if members else 0
        if model >= gap_entropy_coder.MEANS:
            raise IntegrityError(f"{where}: model {model} is not one of {gap_entropy_coder.MEANS}")
        means[c] = model
        total += members
        ends[c] = total
    if total != changed:
        raise IntegrityError(f"{where}: its classes hold {total} of {changed} changes")
    sizes = [reader.varint(len(view)) for _ in range(3)]
    states = reader.take(16).view("<u4").astype(np.uint64)
    words16, raw = np.zeros(sizes[0] + 1, "<u2"), np.zeros(sizes[1] + gap_entropy_coder.SPARE_BYTES, np.uint8)
    words16[:-1] = np.frombuffer(reader.take(2 * sizes[0]), "<u2")
    raw[: sizes[1]] = reader.take(sizes[1])
    directions = reader.take(sizes[2])
    rest = reader.take(len(view) - reader.at)
    ranked = _room.array("ranked", changed + top + 1, np.uint32)
    ro = kernels.readonly
    valid = gap_entropy_coder.unpack_gaps(
        states,
        ro(words16),
        ro(raw),
        ends,
        means,
        gap_entropy_coder.STARTS,
        gap_entropy_coder.LOW_BITS,
        cell.words,
        ranked,
    )
    if not valid:
        raise IntegrityError(f"{where}: its gaps end too early or too late")
    window = Window(shift, base, top)
    positions, held, digest = _decode_positions(cell, old, window, ranked, ends, audit=audit, where=where)
    ups = _decode_directions(cell, directions, positions, held, row_words, flags >> 1, where)
    steps, listed = np.empty(changed, word_dtype(width)), _room.array("listed", changed + 1, np.uint32)
    if not step_entropy_coder.unpack_steps(
        ro(rest), ro(held), ro(ups), shift, base + top, np.uint64(coded_contexts), listed, steps
    ):
        raise IntegrityError(f"{where}: its step sizes end too early or too late")
    return positions, held, steps, digest


def _decode_positions(
    cell: Cell, old: Words, window: Window, ranked: Words, ends: Words, *, audit: bool, where: str
) -> tuple[Positions, Words, int | None]:
    """Return (positions, old words there, digest if ``audit``). Raises IntegrityError if no word has a rank."""
    changed = int(ends[-1])
    positions, held = np.empty(changed + 2, np.uint32), np.empty(changed, word_dtype(cell.word_bytes))
    bases = np.zeros(class_ranks.CLASSES, np.uint32)
    cursor = np.zeros(class_ranks.CLASSES, np.uint64)
    cursor[1 : ends.size] = ends[:-1] + np.arange(1, ends.size)
    found, digest = 0, 0
    lanes = max(1, cell.word_bytes // 2)
    for place, words, count in _blocks(old):
        valid = np.uint64((1 << (count % 64)) - 1 if count % 64 else (1 << 64) - 1)
        row_lanes = kernels.readonly(lanes_of(words)[: count * lanes])
        placed, part = class_ranks.unrank(
            words, row_lanes, place, valid, kernels.readonly(ranked), window.shift, window.base, window.top,
            bases, cursor, positions, held, found, cell.start + place, seed(cell.tensor), TABLE, audit,
        )  # fmt: skip
        found, digest = int(placed), (digest + int(part)) & ((1 << 64) - 1)
    if found != changed:
        raise IntegrityError(
            f"{where}: {changed - found} of its {changed} changes lie outside the cell; "
            "the payload is damaged or the base is wrong"
        )
    return positions[:changed], held, digest if audit else None


def _decode_directions(
    cell: Cell,
    directions: npt.NDArray[np.uint8],
    positions: Positions,
    held: Words,
    row_words: int,
    apart: int,
    where: str,
) -> npt.NDArray[np.uint8]:
    """Return the directions, one u8 each. ``apart``: 1 if signs have separate contexts. Raises IntegrityError."""
    count = positions.size
    if not row_words:
        if directions.size != (count + 7) // 8 or (count % 8 and directions[-1] >> (count % 8)):
            raise IntegrityError(f"{where}: {directions.size} bytes are not {count} directions")
        return np.unpackbits(directions, count=count, bitorder="little")
    ups = _room.array("ups", count, np.uint8)
    columns = _room.array("columns", row_words, np.uint8, zeros=True)
    ro = kernels.readonly
    if not step_entropy_coder.unpack_directions(
        ro(positions), ro(held), ro(directions), apart, cell.start, row_words, columns, ups
    ):
        raise IntegrityError(f"{where}: its directions end too early or too late")
    return ups
