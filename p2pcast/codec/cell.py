"""Encodes and decodes one cell: compare, choose a codec, verify, apply.

Guarantee: ``decode`` either returns exactly the encoded words, with both digests verified, or raises IntegrityError; it
writes nothing. Formats: docs/formats/delta-format.md §2 and §3. Pure. Dense passes release the GIL, so threads can code
cells in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pcast.codec import kernels
from p2pcast.codec.context_codec import decode_context, encode_context
from p2pcast.codec.dense_codec import Buffer, decode_dense, encode_dense, estimate_dense
from p2pcast.codec.digest import MASK, TABLE, check_words, digest, lanes_of, seed, word_dtype
from p2pcast.codec.flat_codec import decode_flat, encode_flat
from p2pcast.codec.layout import Cell
from p2pcast.codec.scratch import ScratchBuffers
from p2pcast.ground.errors import IntegrityError, UsageError

__all__ = [
    "CODECS", "CODEC_NAMES", "CONTEXT", "DENSE", "FLAT", "NONE", "RAW",
    "Change", "Codec", "Decoded", "Encoded", "Patch", "apply", "decode", "digest", "encode",
]  # fmt: skip

NONE, RAW, DENSE, FLAT, CONTEXT = 0, 1, 2, 3, 4
CODEC_NAMES: dict[int, str] = {NONE: "none", RAW: "raw", DENSE: "dense", FLAT: "flat", CONTEXT: "context"}

DENSE_PAYS_FROM = 16
"""``dense`` is tried if ``flat`` takes more than 1/16 of the cell's bytes. At RL's rates of change, sparser cells never
gain from it.
"""

Words = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Change:
    """An encoder's input: all words before and after, and the changed words' positions, old values (``held``) and steps
    (mod 2^bits).

    The arrays are valid only during the call.
    """

    old: Words
    new: Words
    positions: Positions
    held: Words
    steps: Words


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoder's result. ``positions``: None if ``words`` are all words of the cell.

    ``held``: the digest of the old words if the codec was asked for it and computed it in its own pass; None leaves it
    to ``decode``. ``delta``: by how much the change increases the digest; None exactly if ``positions`` is None.
    """

    positions: Positions | None
    words: Words
    held: int | None = None
    delta: int | None = None


class Codec(Protocol):
    """A way to encode one changed cell."""

    id: int
    name: str

    def encode(self, cell: Cell, change: Change) -> bytes:
        """Return the payload. ``change`` has at least one position."""
        ...

    def decode(self, cell: Cell, payload: Buffer, old: Words | None, *, audit: bool) -> Decoded:
        """Decode a payload. ``audit``: compute the digest of ``old``. Raises IntegrityError if it is malformed."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded cell: its directory entry and its payload. ``changed``: number of changed words."""

    cell: int
    codec: int
    payload: bytes
    before: int
    after: int
    changed: int


@dataclass(slots=True)
class Patch:
    """The new values of words of one cell.

    ``positions``: u32, ascending, from the cell's start; None if ``words`` are all words of the cell.
    """

    cell: int
    positions: Positions | None
    words: Words
    before: int
    after: int
    changed: int


class RawCodec:
    """The new words, uncompressed."""

    id, name = RAW, "raw"

    def encode(self, cell: Cell, change: Change) -> bytes:
        return change.new.tobytes()

    def decode(self, cell: Cell, payload: Buffer, old: Words | None, *, audit: bool) -> Decoded:
        view = memoryview(payload).cast("B")
        if len(view) != cell.nbytes:
            raise IntegrityError(f"cell {cell.index}: raw payload of {len(view)} bytes, the cell has {cell.nbytes}")
        return Decoded(None, np.frombuffer(view, dtype=word_dtype(cell.word_bytes)))


class DenseCodec:
    """The new words as byte planes, each compressed with zstd."""

    id, name = DENSE, "dense"

    def encode(self, cell: Cell, change: Change) -> bytes:
        return encode_dense(change.new)

    def decode(self, cell: Cell, payload: Buffer, old: Words | None, *, audit: bool) -> Decoded:
        return Decoded(None, decode_dense(payload, cell))


class FlatCodec:
    """Gaps between changed words, and their steps in ULPs."""

    id, name = FLAT, "flat"

    def encode(self, cell: Cell, change: Change) -> bytes:
        return encode_flat(change.positions, change.steps, cell.words)

    def decode(self, cell: Cell, payload: Buffer, old: Words | None, *, audit: bool) -> Decoded:
        if old is None:
            raise UsageError(f"cell {cell.index}: codec flat can't be decoded without the cell's old words")
        positions, steps = decode_flat(payload, cell)
        ro, words = kernels.readonly, np.empty_like(steps)
        held, delta = kernels.apply_steps(
            old, lanes_of(old), ro(positions), ro(steps), cell.start, seed(cell.tensor), TABLE, audit, words
        )
        return Decoded(positions, words, int(held) if audit else None, int(delta))


class ContextCodec:
    """Gaps among words of similar magnitude, and the directions and sizes of steps, entropy coded."""

    id, name = CONTEXT, "context"

    def encode(self, cell: Cell, change: Change) -> bytes:
        return encode_context(cell, change.old, change.positions, change.steps, change.held)

    def decode(self, cell: Cell, payload: Buffer, old: Words | None, *, audit: bool) -> Decoded:
        if old is None:
            raise UsageError(f"cell {cell.index}: codec context can't be decoded without the cell's old words")
        positions, was, steps, held = decode_context(payload, cell, old, audit=audit)
        now, ro = was + steps, kernels.readonly
        delta = kernels.digest_of_change(ro(positions), ro(was), ro(now), cell.start, seed(cell.tensor), TABLE)
        return Decoded(positions, now, held, int(delta))


CODECS: dict[int, Codec] = {c.id: c for c in (RawCodec(), DenseCodec(), FlatCodec(), ContextCodec())}
_BY_NAME: dict[str, Codec] = {c.name: c for c in CODECS.values()}


_room = ScratchBuffers()


def encode(cell: Cell, old: Words, new: Words, *, before: int | None = None, codec: str = "auto") -> Encoded | None:
    """Encode the change of one cell. Returns None if no word changed.

    ``old`` and ``new``: the cell's words. ``before``: the digest of ``old``, computed if None. ``codec``: a name, or
    ``auto`` for the smallest. Raises UsageError if an array does not fit the cell or the codec is unknown.
    """
    was, now = check_words(old, cell), check_words(new, cell)
    if codec != "auto" and codec not in _BY_NAME:
        raise UsageError(f"codec {codec!r} is not one of auto, {', '.join(sorted(_BY_NAME))}")
    room = _room.array("positions", cell.words, np.uint32)
    held_room, step_room = _room.array("held", cell.words, was.dtype), _room.array("steps", cell.words, was.dtype)
    changed, delta = kernels.scan(was, now, cell.start, seed(cell.tensor), TABLE, room, held_room, step_room)
    if changed == 0:
        return None
    if before is None:
        before = digest(was, cell)
    change = Change(was, now, room[:changed], held_room[:changed], step_room[:changed])
    chosen, payload = (
        _smallest(cell, change) if codec == "auto" else (_BY_NAME[codec].id, _BY_NAME[codec].encode(cell, change))
    )
    return Encoded(cell.index, chosen, payload, before, (before + int(delta)) & MASK, changed)


def _smallest(cell: Cell, change: Change) -> tuple[int, bytes]:
    payload = CODECS[FLAT].encode(cell, change)
    if len(payload) * DENSE_PAYS_FROM <= cell.nbytes:
        return FLAT, payload
    whole, dense = encode_whole(change.new, at_most=len(payload))
    return (FLAT, payload) if dense is None else (whole, dense)


def encode_whole(words: Words, *, at_most: int | None = None) -> tuple[int, bytes | None]:
    """Encode all words of a cell as ``dense`` or ``raw``, whichever is smaller. Returns (codec, payload).

    The payload is None if neither is below ``at_most`` bytes.
    """
    limit = words.nbytes + 1 if at_most is None else at_most
    # Estimate from samples first: encoding the whole cell as ``dense`` takes many times as long as the scan.
    if estimate_dense(words) < limit + limit // 8:
        dense = encode_dense(words)
        if len(dense) < min(limit, words.nbytes):
            return DENSE, dense
    return RAW, words.tobytes() if words.nbytes < limit else None


def decode(
    cell: Cell,
    codec: int,
    payload: Buffer,
    old: Words | None,
    before: int,
    after: int,
    *,
    check_before: bool = True,
) -> Patch:
    """Decode a coded cell and return its patch.

    With ``old`` (the cell's words) and ``check_before``, a dense pass verifies that the digest of ``old`` is
    ``before``. ``after`` is always verified: for whole cells from the words themselves, otherwise from the change of
    the digest. So ``old`` is trusted if ``check_before`` is false. Raises IntegrityError with the cell and the cause,
    and UsageError if an array does not fit the cell.
    """
    was = None if old is None else check_words(old, cell)
    found = CODECS.get(codec)
    if found is None:
        raise IntegrityError(f"cell {cell.index}: codec {codec} is unknown to this p2pcast")
    audit = was is not None and check_before
    got = found.decode(cell, payload, was, audit=audit)
    if audit:
        assert was is not None
        held = digest(was, cell) if got.held is None else got.held
        if held != before:
            raise IntegrityError(
                f"cell {cell.index}: wrong base: its words have digest {held:016x}, the change is against {before:016x}"
            )
    if got.positions is not None:
        changed = got.positions.size
    else:
        changed = cell.words if was is None else int(np.count_nonzero(was != got.words))
    reached = digest(got.words, cell) if got.delta is None else (before + got.delta) & MASK
    if reached != after:
        raise IntegrityError(
            f"cell {cell.index}: {found.name} payload leads to digest {reached:016x}, not {after:016x}"
        )
    return Patch(cell.index, got.positions, got.words, before, after, changed)


def apply(patch: Patch, target: Words) -> None:
    """Write the patch's words to ``target``, the cell's words. Idempotent. Raises UsageError if they do not fit."""
    if target.ndim != 1 or target.dtype != patch.words.dtype:
        raise UsageError(
            f"cell {patch.cell}: a patch of {patch.words.dtype} does not fit {target.dtype}{list(target.shape)}"
        )
    if patch.positions is None:
        if target.size != patch.words.size:
            raise UsageError(f"cell {patch.cell}: {patch.words.size} words do not fit a cell of {target.size}")
        target[:] = patch.words
        return
    if patch.positions.size and int(patch.positions[-1]) >= target.size:
        raise UsageError(f"cell {patch.cell}: position {patch.positions[-1]} is outside a cell of {target.size}")
    target[patch.positions] = patch.words
