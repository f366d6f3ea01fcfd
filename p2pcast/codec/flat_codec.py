"""Codec ``flat`` (docs/formats/delta-format.md §3): gaps between changed positions, and steps in ULPs. Positions can be
decoded without the old words.

Guarantees: decoded positions ascend strictly and are inside the cell, and no step is zero; any other payload raises
IntegrityError. A decoder allocates at most a few times the cell's size, whatever a payload claims.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec import kernels
from p2pcast.codec.dense_codec import Buffer, pack_stream, unpack_stream
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError

VERSION = 1
_HEAD = struct.Struct("<BBBBI")
_STREAM = struct.Struct("<II")
_ESCAPE = {1: 255, 2: 65535}
WIDE_GAPS_FROM = 400
"""Mean gap, in words, from which two-byte gaps are smaller than one-byte gaps with escapes. At this mean, about half of
geometrically distributed gaps need an escape.
"""

Bytes = npt.NDArray[np.uint8]


def _gap_streams(positions: npt.NDArray[np.uint32], words: int, gap_bytes: int) -> list[Bytes]:
    escape = _ESCAPE[gap_bytes]
    symbols = np.empty(positions.size + words // escape, dtype=word_dtype(gap_bytes))
    symbols = symbols[: kernels.pack_gaps(kernels.readonly(positions), escape, symbols)]
    return _planes(symbols)


def _planes(words: npt.NDArray[Any]) -> list[Bytes]:
    width = words.dtype.itemsize
    rows = words.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(rows[:, k]) for k in range(width)]


def _step_streams(steps: npt.NDArray[Any]) -> list[Bytes]:
    width = steps.dtype.itemsize
    if width == 2:
        halves = np.empty((steps.size + 1) // 2, dtype=np.uint8)
        small = np.empty(steps.size, dtype=np.uint8)
        large = np.empty(steps.size, dtype=np.uint16)
        smalls, larges = kernels.pack_steps16(kernels.readonly(steps), halves, small, large)
        return [halves, small[:smalls], large[:larges].view(np.uint8)]
    signed = steps.view(f"<i{width}")
    return _planes(((signed << 1) ^ (signed >> (8 * width - 1))).view(steps.dtype) - steps.dtype.type(1))


def _step_stream_count(width: int) -> int:
    return 3 if width == 2 else width


def encode_flat(positions: npt.NDArray[np.uint32], steps: npt.NDArray[Any], words: int) -> bytes:
    """Return the payload of a cell of ``words`` words. The words at ``positions`` (ascending, at least one) move by
    ``steps`` (unsigned, none zero).
    """
    gap_bytes = 1 if words < WIDE_GAPS_FROM * positions.size else 2
    streams = _gap_streams(positions, words, gap_bytes) + _step_streams(steps)
    stored = [pack_stream(s, memoryless=True) for s in streams]
    head = _HEAD.pack(VERSION, gap_bytes, steps.dtype.itemsize, len(streams), positions.size)
    table = b"".join(_STREAM.pack(raw.size, len(kept)) for raw, kept in zip(streams, stored, strict=True))
    return b"".join([head, table, *stored])


def decode_flat(payload: Buffer, cell: Cell) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Return a cell's (positions, steps). Raises IntegrityError for a malformed payload."""
    where = f"cell {cell.index}: flat payload"
    view = memoryview(payload).cast("B")
    if len(view) < _HEAD.size:
        raise IntegrityError(f"{where}: {len(view)} bytes are too few for its header of {_HEAD.size}")
    version, gap_bytes, width, count, changed = _HEAD.unpack_from(view)
    if version != VERSION:
        raise IntegrityError(f"{where}: version {version}; this p2pcast reads version {VERSION}")
    if width != cell.word_bytes:
        raise IntegrityError(f"{where}: words of {width} bytes, the cell's have {cell.word_bytes}")
    if gap_bytes not in _ESCAPE:
        raise IntegrityError(f"{where}: gaps of {gap_bytes} bytes; only 1 or 2 are defined")
    if count != gap_bytes + _step_stream_count(width):
        raise IntegrityError(f"{where}: {count} streams, not {gap_bytes + _step_stream_count(width)}")
    if not 1 <= changed <= cell.words:
        raise IntegrityError(f"{where}: {changed} changed words in a cell of {cell.words}")
    begin = _HEAD.size + count * _STREAM.size
    if len(view) < begin:
        raise IntegrityError(f"{where}: {len(view)} bytes are too few for its table of streams")
    sizes = [_STREAM.unpack_from(view, _HEAD.size + k * _STREAM.size) for k in range(count)]
    if begin + sum(stored for _, stored in sizes) != len(view):
        raise IntegrityError(
            f"{where}: streams of {sum(s for _, s in sizes)} bytes do not fill a payload of {len(view)}"
        )
    _check_sizes([raw for raw, _ in sizes], gap_bytes, width, changed, cell.words, where)
    streams: list[Bytes] = []
    for k, (raw, stored) in enumerate(sizes):
        streams.append(
            np.frombuffer(unpack_stream(view[begin : begin + stored], raw, f"{where}: stream {k}"), np.uint8)
        )
        begin += stored
    positions = _positions(streams[:gap_bytes], changed, cell.words, where)
    return positions, _steps(streams[gap_bytes:], width, changed, where)


def _check_sizes(raw: list[int], gap_bytes: int, width: int, changed: int, words: int, where: str) -> None:
    """Check every stream's raw size against the header before any stream is unpacked."""
    gaps, steps = raw[:gap_bytes], raw[gap_bytes:]
    most = changed + (words - changed) // _ESCAPE[gap_bytes]
    if len(set(gaps)) != 1 or not changed <= gaps[0] <= most:
        raise IntegrityError(f"{where}: gaps of {gaps} bytes; {changed} to {most} are possible")
    if width == 2:
        halves, small, large = steps
        if halves != (changed + 1) // 2 or small > changed or large > 2 * small or large % 2:
            raise IntegrityError(f"{where}: streams of {steps} bytes can't be {changed} steps")
        return
    if any(size != changed for size in steps):
        raise IntegrityError(f"{where}: streams of {steps} bytes for {changed} steps")


def _interleave(streams: list[Bytes], width: int) -> npt.NDArray[Any]:
    if width == 1:
        return streams[0]
    rows = np.empty((streams[0].size, width), dtype=np.uint8)
    for k, stream in enumerate(streams):
        rows[:, k] = stream
    return rows.reshape(-1).view(word_dtype(width))


def _positions(streams: list[Bytes], changed: int, words: int, where: str) -> npt.NDArray[np.uint32]:
    symbols = _interleave(streams, len(streams))
    positions = np.empty(symbols.size + 1, dtype=np.uint32)
    escape = _ESCAPE[len(streams)]
    found, spanned = kernels.unpack_gaps(kernels.readonly(symbols), escape, positions)
    if found != changed or symbols[-1] == escape:
        raise IntegrityError(f"{where}: its gaps make {found} positions, not {changed}")
    if spanned > words:
        raise IntegrityError(f"{where}: a position lies outside the cell's {words} words")
    return positions[:changed]


def _steps(streams: list[Bytes], width: int, changed: int, where: str) -> npt.NDArray[Any]:
    dtype = word_dtype(width)
    if width == 2:
        steps = np.empty(changed, dtype=dtype)
        halves, small = map(kernels.readonly, streams[:2])
        large = kernels.readonly(np.frombuffer(streams[2], dtype=dtype))
        if not kernels.unpack_steps16(halves, small, large, steps) or (changed % 2 and halves[-1] >> 4):
            raise IntegrityError(f"{where}: its large steps do not fit its small ones, or a step is zero")
        return steps
    codes = _interleave(streams, width) + dtype.type(1)
    if not codes.all():
        raise IntegrityError(f"{where}: a step is zero")
    one = dtype.type(1)
    return np.asarray((codes >> one) ^ (~(codes & one) + one))
