"""A rival's format: SparrowRL's delta checkpoint (section 5.1 of its paper), in its most compact reading.

Per flattened tensor: the changed positions, the first absolute and the others as differences, as unsigned LEB128
varints; then the raw values of the changed words. No further compression. Names and shapes travel separately and are
not counted. Nor is the engine's fusing of tensors, which changes a few first positions. Absolute new values replace the
paper's differences: they have the same length, and are lossless in any dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from netem.bench.codec_comparison.pulse_format import Changes

_HEAD = struct.Struct("<II")
"""Of a tensor: number of changed words, bytes of their varints."""
_BITS = 7
_MOST = 10
"""Bytes of a varint of 64 bits."""


def encode(changes: Changes) -> bytes:
    """All tensors in sequence."""
    parts: list[bytes] = []
    for positions, values in changes:
        coded = leb128(np.diff(positions, prepend=0))
        parts += [_HEAD.pack(len(positions), len(coded)), coded, values.tobytes()]
    return b"".join(parts)


def decode(blob: bytes, dtypes: Sequence[Any]) -> Changes:
    """Undo ``encode``, for bytes of that encoder only: a reference for measurements, without checks against malformed
    input.
    """
    changes: Changes = []
    at = 0
    for dtype in dtypes:
        count, stored = _HEAD.unpack_from(blob, at)
        at += _HEAD.size
        positions = np.cumsum(read_leb128(blob[at : at + stored]))
        at += stored
        changes.append((positions, np.frombuffer(blob, dtype, count, at)))
        at += count * np.dtype(dtype).itemsize
    return changes


def leb128(numbers: npt.NDArray[np.int64]) -> bytes:
    """Unsigned varints of non-negative numbers, lowest 7 bits first."""
    lengths = np.ones(numbers.size, dtype=np.int64)
    for more in range(1, _MOST):
        longer = numbers >> (_BITS * more) > 0
        if not longer.any():
            break
        lengths += longer
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if ends.size else 0, dtype=np.uint8)
    starts = ends - lengths
    for k in range(int(lengths.max(initial=0))):
        here = lengths > k
        low = (numbers[here] >> (_BITS * k)) & 0x7F
        out[starts[here] + k] = low | np.where(lengths[here] > k + 1, 0x80, 0)
    return out.tobytes()


def read_leb128(data: bytes) -> npt.NDArray[np.int64]:
    """Undo ``leb128``."""
    rest = np.frombuffer(data, dtype=np.uint8)
    if not rest.size:
        return np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(rest < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(rest.size) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((rest & 0x7F).astype(np.int64) << (_BITS * place), starts)
