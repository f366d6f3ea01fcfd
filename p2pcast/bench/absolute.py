"""What verl sends: of each tensor, flattened, the changed positions as int32 and the new values, raw. Neither differences nor compression; counts travel outside and are not counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from p2pcast.bench.pulse import Changes

POSITION = np.dtype("<i4")


def encode(changes: Changes) -> bytes:
    """All tensors behind each other. For tensors of less than 2**31 words."""
    return b"".join(part for positions, values in changes for part in (positions.astype(POSITION).tobytes(), values.tobytes()))


def decode(blob: bytes, counts: Sequence[int], dtypes: Sequence[Any]) -> Changes:
    """Undo ``encode``, given each tensor's changed words. For its own encoder's bytes alone."""
    changes: Changes = []
    at = 0
    for count, dtype in zip(counts, dtypes, strict=True):
        positions = np.frombuffer(blob, POSITION, count, at).astype(np.int64)
        at += positions.size * POSITION.itemsize
        changes.append((positions, np.frombuffer(blob, dtype, count, at)))
        at += count * np.dtype(dtype).itemsize
    return changes
