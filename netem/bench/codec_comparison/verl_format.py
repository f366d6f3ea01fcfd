"""verl's format: of each flattened tensor, the changed positions as int32 and the raw new values. There is no
differencing and no compression; counts travel separately and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netem.bench.codec_comparison.pulse_format import Changes

POSITION = np.dtype("<i4")


def encode(changes: Changes) -> bytes:
    """All tensors in sequence. For tensors of less than 2**31 words."""
    return b"".join(
        part for positions, values in changes for part in (positions.astype(POSITION).tobytes(), values.tobytes())
    )


def decode(blob: bytes, counts: Sequence[int], dtypes: Sequence[Any]) -> Changes:
    """Undo ``encode``, given the number of changed words of each tensor. For bytes of that encoder only."""
    changes: Changes = []
    at = 0
    for count, dtype in zip(counts, dtypes, strict=True):
        positions = np.frombuffer(blob, POSITION, count, at).astype(np.int64)
        at += positions.size * POSITION.itemsize
        changes.append((positions, np.frombuffer(blob, dtype, count, at)))
        at += count * np.dtype(dtype).itemsize
    return changes
