"""The format of slime and SkyRL: old XOR new of each tensor, zstd-1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

LEVEL = 1

Words = npt.NDArray[Any]


def encode(old: Words, new: Words) -> bytes:
    """One zstd frame, which states its content size."""
    return zstandard.ZstdCompressor(level=LEVEL).compress((old ^ new).data)


def decode(blob: bytes, old: Words) -> Words:
    """The new words. For bytes of that encoder only."""
    return (
        np.frombuffer(zstandard.ZstdDecompressor().decompress(blob, max_output_size=old.nbytes), dtype=old.dtype) ^ old
    )
