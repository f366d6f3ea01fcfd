"""Types of the records' fields, with their constraints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import numpy as np

from p2pcast.wire.constraints import Binary, Integer, InvalidError, Read, Text

MAX_TOKENS: Final = 1 << 20
"""Most tokens of one sample, including those of the environment."""
MAX_GROUP: Final = 1024
"""Most jobs of one group."""
MAX_TURNS: Final = 4096
MAX_SPANS: Final = 4096
"""Most versions in one sample, because each commit during generation begins a span."""


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number."""

    low: float = -math.inf
    high: float = math.inf

    def reader(self) -> Read:
        def read(x: Any) -> float:
            if type(x) not in (float, int) or not (self.low <= x <= self.high) or not math.isfinite(x):
                raise InvalidError
            return float(x)

        return read


@dataclass(frozen=True, slots=True)
class Array:
    """A vector of at most ``most`` numbers of a little-endian type, as its bytes; read-only."""

    dtype: str
    most: int

    def reader(self) -> Read:
        dtype = np.dtype(self.dtype)

        def read(x: Any) -> np.ndarray:
            if type(x) is not bytes or len(x) % dtype.itemsize or len(x) > self.most * dtype.itemsize:
                raise InvalidError
            return np.frombuffer(x, dtype)

        return read


Id: TypeAlias = Annotated[bytes, Binary(16)]
Hash: TypeAlias = Annotated[bytes, Binary(32)]
Seed: TypeAlias = Annotated[int, Integer(0, (1 << 64) - 1)]
Count: TypeAlias = Annotated[int, Integer(0, MAX_TOKENS)]
TaskName: TypeAlias = Annotated[str, Text(128)]
TokenIds: TypeAlias = Annotated[np.ndarray, Array("<u4", MAX_TOKENS)]
Mask: TypeAlias = Annotated[np.ndarray, Array("u1", MAX_TOKENS)]
"""1 or 0 for each token."""
Logprobs: TypeAlias = Annotated[np.ndarray, Array("<f4", MAX_TOKENS)]
Temperature: TypeAlias = Annotated[float, Real(0.0, 100.0)]
