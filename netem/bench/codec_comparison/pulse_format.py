"""A rival's format: PULSE's sparse patches (section 4.1 and appendix E of its paper), in their most compact reading,
made lossless.

Per tensor the changed positions in ascending order and the raw new values; over the whole model three streams (rows,
columns, values), zstd-1 each. Row deltas are u8 and column deltas u16, as in the paper; columns restart where the row
changes. The paper does not define deltas that do not fit: here the largest value stands for a u32 in a side stream.
Tensors of more than two dimensions count as (first, all others), and 1-D tensors as a single row. The paper's 1-D
variant (global positions, i32 deltas) is included; reports take the smaller. Names and shapes travel separately and are
not counted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

LEVEL = 1
_PART = struct.Struct("<II")

Words = npt.NDArray[Any]
Changes = list[tuple[npt.NDArray[np.int64], Words]]
"""Per tensor: ascending flat positions, new values."""


def columns_of(shape: Sequence[int]) -> int:
    """Columns of a tensor's 2-D view."""
    return max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))


def _join(parts: Sequence[bytes], level: int = LEVEL) -> bytes:
    packer = zstandard.ZstdCompressor(level=level)
    stored = [packer.compress(p) for p in parts]
    return b"".join([_PART.pack(len(p), len(s)) + s for p, s in zip(parts, stored, strict=True)])


def _split(blob: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(blob):
        raw, stored = _PART.unpack_from(blob, at)
        at += _PART.size
        parts.append(zstandard.ZstdDecompressor().decompress(blob[at : at + stored], max_output_size=raw))
        at += stored
    return parts


def _narrow(values: npt.NDArray[np.int64], dtype: str) -> tuple[bytes, bytes]:
    escape = np.iinfo(dtype).max
    wide = values >= escape
    return np.where(wide, escape, values).astype(dtype).tobytes(), values[wide].astype("<u4").tobytes()


def _widen(narrow: bytes, wide: bytes, dtype: str) -> npt.NDArray[np.int64]:
    values = np.frombuffer(narrow, dtype).astype(np.int64)
    values[values == np.iinfo(dtype).max] = np.frombuffer(wide, "<u4")
    return values


def encode_coo(changes: Changes, shapes: Sequence[Sequence[int]], level: int = LEVEL) -> bytes:
    """2-D COO, sorted, deltas, downscaled. ``level``: zstd's; the paper takes 3 below 14 Mbit/s."""
    row_parts, column_parts = [], []
    for (positions, _), shape in zip(changes, shapes, strict=True):
        rows, columns = np.divmod(positions, columns_of(shape))
        row_steps = np.diff(rows, prepend=0)
        before = np.concatenate([[0], columns[:-1]]) if len(columns) else columns
        row_parts.append(row_steps)
        column_parts.append(np.where(row_steps == 0, columns - before, columns))
    counts = np.array([len(p) for p, _ in changes], dtype="<u4").tobytes()
    narrow_rows, wide_rows = _narrow(np.concatenate(row_parts), "<u1")
    narrow_columns, wide_columns = _narrow(np.concatenate(column_parts), "<u2")
    values = b"".join(v.tobytes() for _, v in changes)
    return _join([counts, narrow_rows, wide_rows, narrow_columns, wide_columns, values], level)


def _with_values(positions: list[npt.NDArray[np.int64]], values: bytes, dtypes: Sequence[Any]) -> Changes:
    out: Changes = []
    at = 0
    for where, dtype in zip(positions, dtypes, strict=True):
        out.append((where, np.frombuffer(values, dtype, len(where), at)))
        at += len(where) * np.dtype(dtype).itemsize
    return out


def decode_coo(blob: bytes, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> Changes:
    """Undo ``encode_coo``, for bytes of that encoder only: a reference for measurements, without checks against
    malformed input.
    """
    counts, narrow_rows, wide_rows, narrow_columns, wide_columns, values = _split(blob)
    row_steps, column_steps = _widen(narrow_rows, wide_rows, "<u1"), _widen(narrow_columns, wide_columns, "<u2")
    positions = []
    begin = 0
    for count, shape in zip(np.frombuffer(counts, "<u4").tolist(), shapes, strict=True):
        rows, columns = row_steps[begin : begin + count], column_steps[begin : begin + count]
        begin += count
        total = np.cumsum(columns)
        starts = np.flatnonzero(rows != 0)
        base = np.zeros(count, dtype=np.int64)
        base[starts] = np.diff(total[starts] - columns[starts], prepend=0)
        positions.append(np.cumsum(rows) * columns_of(shape) + total - np.cumsum(base))
    return _with_values(positions, values, dtypes)


def encode_flat32(changes: Changes, sizes: Sequence[int]) -> bytes:
    """1-D: positions in the whole model, deltas as i32 (wider ones as u64 beside them), raw values."""
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    everywhere = np.concatenate([p + s for (p, _), s in zip(changes, starts.tolist(), strict=False)])
    gaps = np.diff(everywhere, prepend=0)
    wide = gaps >= 0x7FFFFFFF
    narrow = np.where(wide, 0x7FFFFFFF, gaps).astype("<i4").tobytes()
    return _join([narrow, gaps[wide].astype("<u8").tobytes(), b"".join(v.tobytes() for _, v in changes)])
