"""Codec ``context`` (docs/delta-format.md §3): where and how far words move, told in terms of the old words.

Whether a word changes depends on its magnitude: a step of the optimiser is so many ULPs of a small weight and a fraction of an ULP of a large one. So
positions are gaps between changed members of one class (``ranks``), each class with its own geometric model (``gaps``), and steps are a direction in
value and a size (``moves``). Needs the old words to decode, positions included.

Promise: decodes to what was encoded or raises IntegrityError; allocates no more than a few times the cell, whatever a payload claims; reads and writes
inside its arrays by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec import gaps, kernels, moves, ranks
from p2pcast.codec.dense import Buffer
from p2pcast.codec.digest import TABLE, lanes_of, seed, word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.codec.room import Room
from p2pcast.errors import IntegrityError

VERSION = 1
MAX_ROW_WORDS = 1 << 20
"""Longest row whose columns are told apart: a byte each."""
SHIFTS = {1: (3, 4), 2: (8, 11), 4: (24,), 8: (56,)}
"""Word width → what may be dropped below the exponent: of e5m2 and e4m3, bf16 and f16, f32; of 8 bytes, the top 8 bits are taken."""
SURVEYED_WORDS = 1 << 14
"""Words looked at to choose classes; of a larger cell a part, evenly."""
CLASS_COST_BITS = 24.0
"""What another class takes in the header."""
NEAR = 0.0025
"""More classes have to save more than this share: each four of them take time."""
WORTH = 0.95
"""Directions are told in context where that takes less than this share of a bit each: a few per cent of them are not worth the time."""
SAMPLED_MOVES = 1 << 12
"""Changes looked at to tell whether directions are worth a context: so many in a row, for contexts are learnt from what came before."""

_IN_CONTEXT = 1
_SIGNS_APART = 2
_FLAGS = (0, _IN_CONTEXT, _IN_CONTEXT | _SIGNS_APART)
_FIXED = 10

Words = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Window:
    """Which classes there are: see ``ranks``."""

    shift: int
    base: int
    top: int


_room = Room()


def _blocks(words: Words) -> list[tuple[int, Words, int]]:
    """(place, whole blocks, how many of their words count): the cell, its end filled up with zeros."""
    whole = words.size & ~(ranks.BLOCK_WORDS - 1)
    parts = [(0, kernels.readonly(words[:whole]), whole)] if whole else []
    if whole < words.size:
        rest = np.zeros(ranks.BLOCK_WORDS, words.dtype)
        rest[: words.size - whole] = words[whole:]
        parts.append((whole, kernels.readonly(rest), words.size - whole))
    return parts


def pace_of(words: int) -> int:
    """Every how many-th block of 64 words a census of a cell of so many looks at."""
    return max(1, words // SURVEYED_WORDS)


def choose_window(
    cell: Cell, counts: npt.NDArray[np.int64], changed: npt.NDArray[np.int64]
) -> tuple[Window, npt.NDArray[np.int64]]:
    """The classes that make positions cheap, as far as a census tells, and how many changed words are of each class or below it. Both of 256 levels of the
    finest shift: ``counts`` of the words in every ``pace_of``-th block, ``changed`` of all words that change."""
    shifts = SHIFTS[cell.word_bytes]
    widths = np.array([1 << (shift - shifts[0]) for shift in shifts])
    ends = np.empty(ranks.CLASSES, np.int64)
    scale = cell.words / int(counts.sum())
    which, base, top = ranks.choose(counts, scale, widths, changed, CLASS_COST_BITS, NEAR, ends)
    return Window(shifts[which], int(base), int(top)), ends[: top + 1]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    """The header's numbers, in order."""

    def __init__(self, view: memoryview, at: int, where: str) -> None:
        self.view, self.at, self.where = view, at, where

    def byte(self) -> int:
        if self.at >= len(self.view):
            raise IntegrityError(f"{self.where}: it ends inside its header")
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
            raise IntegrityError(f"{self.where}: its streams are cut off")
        self.at += size
        return np.frombuffer(self.view, np.uint8, size, self.at - size) if size else np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Noted:
    """What the changed words tell by themselves: levels of the finest shift, directions and sizes of steps, in order of position; how many are of each level
    (``counts``), and of which one is larger than a step (``large``). Valid until the thread's next."""

    positions: Positions
    levels: npt.NDArray[np.uint8]
    ups: npt.NDArray[np.uint8]
    sizes: Words
    counts: npt.NDArray[np.int64]
    large: npt.NDArray[np.uint8]


def note(cell: Cell, positions: Positions, held: Words, steps: Words) -> Noted:
    """Of words ``held`` at ``positions`` (ascending, at least one) that move by ``steps`` (unsigned, none zero)."""
    ro, count = kernels.readonly, positions.size
    levels, ups = _room.array("levels", count, np.uint8), _room.array("ups", count, np.uint8)
    sizes, moved, large = _room.array("sizes", count, steps.dtype), np.zeros(256, np.int64), np.zeros(256, np.uint8)
    ranks.look(ro(held), ro(steps), SHIFTS[cell.word_bytes][0], levels, ups, sizes, moved, large)
    return Noted(ro(positions), levels, ups, sizes, moved, large)


def encode_context(cell: Cell, old: Words, positions: Positions, steps: Words, held: Words | None = None) -> bytes:
    """Payload of a cell whose words at ``positions`` (ascending, at least one) move by ``steps`` (unsigned, none zero). ``held``: the words there, if known.

    It takes a census of the old words and ranks among them; where they lie elsewhere, these are made there (``device.context``), and the bytes here.
    """
    old = kernels.readonly(old)
    noted = note(cell, positions, old[positions] if held is None else held, steps)
    counts = np.zeros(256, np.int64)
    ranks.census(old, pace_of(cell.words), SHIFTS[cell.word_bytes][0], counts)
    window, ends = choose_window(cell, counts, noted.counts)
    return payload_of(cell, noted, window, ends, _ranked(cell, old, noted, window, ends))


def _ranked(cell: Cell, old: Words, noted: Noted, window: Window, ends: Words) -> npt.NDArray[np.uint32]:
    """Ranks of the changed words in their classes, class by class."""
    found, cursor = _room.array("ranked", noted.positions.size, np.uint32), np.zeros(ranks.CLASSES, np.uint64)
    cursor[1 : ends.size] = ends[:-1]
    bases, levels = np.zeros(ranks.CLASSES, np.uint32), kernels.readonly(noted.levels)
    coarse = window.shift - SHIFTS[cell.word_bytes][0]
    k = 0
    for place, words, _ in _blocks(old):
        k = ranks.rank(
            words, place, noted.positions, levels, k, coarse, window.shift, window.base, window.top, bases, cursor, found
        )
    return found


def payload_of(cell: Cell, noted: Noted, window: Window, ends: Words, ranked: npt.NDArray[np.uint32]) -> bytes:
    """The bytes. ``ranked``: of each changed word its rank in its class, class by class, in order of position; ``ends`` as from ``choose_window``."""
    ro, count = kernels.readonly, noted.positions.size
    ranked, means = ro(ranked), np.zeros(ends.size, np.int64)
    gaps.fit(ranked, ends, means)
    symbols, words16 = _room.array("symbols", count, np.uint8), _room.array("words", count + 2, np.uint16)
    raw = _room.array("raw", 10 * count + gaps.SPARE_BYTES, np.uint8)
    *states, begin, used = gaps.pack_gaps(ranked, ends, means, gaps.STARTS, gaps.LOW_BITS, symbols, words16, raw)
    flags, told = _directions(cell, noted.positions, noted.ups)
    coded, said = _sizes(cell, noted, window)
    head = [bytes((VERSION, cell.word_bytes, window.shift, window.base, window.top, flags)), coded.to_bytes(4, "little")]
    head.append(_varint(count))
    if flags & _IN_CONTEXT:
        head.append(_varint(_row_words(cell)))
    start = 0
    for c in range(ends.size):
        head.append(_varint(int(ends[c]) - start))
        if ends[c] > start:
            head.append(bytes((int(means[c]),)))
        start = int(ends[c])
    head += [_varint(words16.size - begin), _varint(used), _varint(len(told))]
    head += [int(state).to_bytes(4, "little") for state in states]
    return b"".join([*head, words16[begin:].tobytes(), raw[:used].tobytes(), told, said])


def _sizes(cell: Cell, noted: Noted, window: Window) -> tuple[int, bytes]:
    """(contexts that are coded, a bit each; sizes)."""
    levels, coarse, highest = noted.levels, window.shift - SHIFTS[cell.word_bytes][0], window.base + window.top
    coded = 0
    for level in np.flatnonzero(noted.large).tolist():
        coded |= 1 << min(max(highest - (level >> coarse), 0), moves.LEVEL_CONTEXTS - 1)
    if not coded:
        return 0, b""
    ro, count = kernels.readonly, levels.size
    listed = _room.array("listed", count + 1, np.uint32)
    if coarse:
        levels = np.right_shift(levels, np.uint8(coarse), out=_room.array("coarse", count, np.uint8))
    found = moves.told_sizes(ro(levels), highest, np.uint64(coded), listed)
    out = _room.array("said", int(found) * (4 * cell.word_bytes + 4) + 16, np.uint8)
    said = moves.pack_sizes(ro(noted.sizes), ro(levels), ro(listed[:found]), highest, 8 * cell.word_bytes, out)
    return coded, out[:said].tobytes()


def _row_words(cell: Cell) -> int:
    return cell.row_words if 0 < cell.row_words <= MAX_ROW_WORDS else 1


def _directions(cell: Cell, positions: Positions, ups: npt.NDArray[np.uint8]) -> tuple[int, bytes]:
    """(flags, directions): in context, if that takes less than a bit each, the old words' signs told apart where they tell something."""
    row_words, ro = _row_words(cell), kernels.readonly
    columns = _room.array("columns", row_words, np.uint8, zeros=True)
    middle = slice(max(0, (ups.size - SAMPLED_MOVES) // 2), (ups.size + SAMPLED_MOVES) // 2)
    some, said = positions[middle], ups[middle]
    together, apart = moves.direction_bits(ro(some), ro(said), ups.size / said.size, cell.start, row_words, columns)
    if min(together, apart) <= WORTH * ups.size:
        told_apart = int(apart < 0.99 * together)
        out = _room.array("directions", 2 * ups.size + 16, np.uint8)
        used = moves.pack_directions(ro(positions), ro(ups), told_apart, cell.start, row_words, columns, out)
        if used < ups.size / 8:
            return _IN_CONTEXT | (_SIGNS_APART if told_apart else 0), out[:used].tobytes()
    return 0, np.packbits(ups & np.uint8(1), bitorder="little").tobytes()


def decode_context(payload: Buffer, cell: Cell, old: Words, *, audit: bool) -> tuple[Positions, Words, Words, int | None]:
    """(positions, the words there, steps, digest of ``old`` where ``audit`` asks for it). Raises IntegrityError."""
    where = f"cell {cell.index}: context payload"
    view = memoryview(payload).cast("B")
    if len(view) < _FIXED:
        raise IntegrityError(f"{where}: {len(view)} bytes are too few for its header")
    version, width, shift, base, top, flags = view[:6]
    coded = int.from_bytes(view[6:10], "little")
    if version != VERSION:
        raise IntegrityError(f"{where}: version {version}; this p2pcast reads version {VERSION}")
    if width != cell.word_bytes or shift not in SHIFTS[width] or top >= ranks.CLASSES or flags not in _FLAGS:
        raise IntegrityError(f"{where}: its header does not fit a cell of {cell.word_bytes}-byte words")
    reader = _Reader(view, _FIXED, where)
    changed = reader.varint(cell.words)
    row_words = reader.varint(MAX_ROW_WORDS) if flags & _IN_CONTEXT else 0
    if not changed or (flags & _IN_CONTEXT and not row_words):
        raise IntegrityError(f"{where}: no changes, or rows of no words")
    ends, means = np.zeros(top + 1, np.int64), np.zeros(top + 1, np.int64)
    total = 0
    for c in range(top + 1):
        members = reader.varint(changed - total)
        model = reader.byte() if members else 0
        if model >= gaps.MEANS:
            raise IntegrityError(f"{where}: model {model} is not one of {gaps.MEANS}")
        means[c] = model
        total += members
        ends[c] = total
    if total != changed:
        raise IntegrityError(f"{where}: its classes hold {total} of {changed} changes")
    sizes = [reader.varint(len(view)) for _ in range(3)]
    states = reader.take(16).view("<u4").astype(np.uint64)
    words16, raw = np.zeros(sizes[0] + 1, "<u2"), np.zeros(sizes[1] + gaps.SPARE_BYTES, np.uint8)
    words16[:-1] = np.frombuffer(reader.take(2 * sizes[0]), "<u2")
    raw[: sizes[1]] = reader.take(sizes[1])
    told = reader.take(sizes[2])
    rest = reader.take(len(view) - reader.at)
    ranked = _room.array("ranked", changed + top + 1, np.uint32)
    ro = kernels.readonly
    fine = gaps.unpack_gaps(states, ro(words16), ro(raw), ends, means, gaps.STARTS, gaps.LOW_BITS, cell.words, ranked)
    if not fine:
        raise IntegrityError(f"{where}: its gaps do not end where they should")
    window = Window(shift, base, top)
    positions, held, digest = _placed(cell, old, window, ranked, ends, audit=audit, where=where)
    ups = _told(cell, told, positions, held, row_words, flags >> 1, where)
    steps, listed = np.empty(changed, word_dtype(width)), _room.array("listed", changed + 1, np.uint32)
    if not moves.unpack_steps(ro(rest), ro(held), ro(ups), shift, base + top, np.uint64(coded), listed, steps):
        raise IntegrityError(f"{where}: its sizes of steps do not end where they should")
    return positions, held, steps, digest


def _placed(
    cell: Cell, old: Words, window: Window, ranked: Words, ends: Words, *, audit: bool, where: str
) -> tuple[Positions, Words, int | None]:
    """(positions, the words there, digest). Raises IntegrityError."""
    changed = int(ends[-1])
    positions, held = np.empty(changed + 2, np.uint32), np.empty(changed, word_dtype(cell.word_bytes))
    bases = np.zeros(ranks.CLASSES, np.uint32)
    cursor = np.zeros(ranks.CLASSES, np.uint64)
    cursor[1 : ends.size] = ends[:-1] + np.arange(1, ends.size)
    found, digest = 0, 0
    lanes = max(1, cell.word_bytes // 2)
    for place, words, count in _blocks(old):
        valid = np.uint64((1 << (count % 64)) - 1 if count % 64 else (1 << 64) - 1)
        row_lanes = kernels.readonly(lanes_of(words)[: count * lanes])
        placed, part = ranks.unrank(
            words, row_lanes, place, valid, kernels.readonly(ranked), window.shift, window.base, window.top,
            bases, cursor, positions, held, found, cell.start + place, seed(cell.tensor), TABLE, audit,
        )  # fmt: skip
        found, digest = int(placed), (digest + int(part)) & ((1 << 64) - 1)
    if found != changed:
        raise IntegrityError(
            f"{where}: {changed - found} of its {changed} changes lie outside the cell, or these are not its old words"
        )
    return positions[:changed], held, digest if audit else None


def _told(
    cell: Cell, told: npt.NDArray[np.uint8], positions: Positions, held: Words, row_words: int, apart: int, where: str
) -> npt.NDArray[np.uint8]:
    """Directions; ``apart``: 1 where they were told with signs apart. Raises IntegrityError."""
    count = positions.size
    if not row_words:
        if told.size != (count + 7) // 8 or (count % 8 and told[-1] >> (count % 8)):
            raise IntegrityError(f"{where}: {told.size} bytes are not {count} directions")
        return np.unpackbits(told, count=count, bitorder="little")
    ups = _room.array("ups", count, np.uint8)
    columns = _room.array("columns", row_words, np.uint8, zeros=True)
    ro = kernels.readonly
    if not moves.unpack_directions(ro(positions), ro(held), ro(told), apart, cell.start, row_words, columns, ups):
        raise IntegrityError(f"{where}: its directions do not end where they should")
    return ups
