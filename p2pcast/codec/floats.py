"""Floating-point formats by their bits: sign, magnitude, ULPs.

The magnitude of a word is its bits without the sign, so neighbours in value are neighbours as integers, and a step of one is one ULP. Signed integers are seen
the same way (their absolute value), unsigned ones have no sign. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]

TOLD_BITS = 3
"""Of a mantissa, when magnitudes are counted: eight counts a power of two."""


@dataclass(frozen=True, slots=True)
class Format:
    """Sign, then ``exponent`` bits with this ``bias``, then ``mantissa`` bits. Magnitudes from ``endless`` on are infinities and NaN."""

    exponent: int
    mantissa: int
    bias: int
    endless: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def dropped(self) -> int:
        """Bits of a magnitude below its first ``TOLD_BITS`` of mantissa."""
        return max(0, self.mantissa - TOLD_BITS)

    @property
    def keys(self) -> int:
        """Number of finite magnitudes when the dropped bits are not told apart."""
        return -(-self.endless >> self.dropped)

    @property
    def survives(self) -> float:
        """Below this many times an update's size a weight's rounded value shows it: 2^(mantissa + 1), 256 for bf16 (PULSE, appendix A.2, equation 5)."""
        return float(2 << self.mantissa)

    def value(self, magnitude: int) -> float:
        """What a magnitude is worth."""
        exponent, rest = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if exponent == 0:
            return math.ldexp(rest, 1 - self.bias - self.mantissa)
        return math.ldexp((1 << self.mantissa) + rest, exponent - self.bias - self.mantissa)

    def least_from(self, value: float) -> int:
        """The least magnitude worth ``value`` or more; ``endless`` where none is."""
        low, high = -1, self.endless
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value(middle) >= value else (middle, high)
        return high


FORMATS: dict[str, Format] = {
    "F64": Format(11, 52, 1023, 0x7FF << 52),
    "F32": Format(8, 23, 127, 0xFF << 23),
    "C64": Format(8, 23, 127, 0xFF << 23),
    "BF16": Format(8, 7, 127, 0xFF << 7),
    "F16": Format(5, 10, 15, 0x1F << 10),
    "F8_E5M2": Format(5, 2, 15, 0x1F << 2),
    "F8_E4M3": Format(4, 3, 7, 0x7F),
    "F8_E5M2FNUZ": Format(5, 2, 16, 0x80),
    "F8_E4M3FNUZ": Format(4, 3, 8, 0x80),
}
"""By safetensors dtype. Of the FNUZ types, NaN is what elsewhere is −0, and passes for 0 here."""
_SPELT_BITS = 11
"""Up to here a power of two is a number that readers know."""


def thresholds_shown(dtypes: Iterable[str]) -> str:
    """Below which multiple of an update η a value shows it, for a heading: ``256·η``; of several types, each with its name. Empty without floats."""
    found = {dtype: FORMATS[dtype].mantissa + 1 for dtype in dtypes if dtype in FORMATS}
    shown = {dtype: f"{1 << bits if bits <= _SPELT_BITS else f'2^{bits}'}·η" for dtype, bits in found.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{threshold} ({dtype})" for dtype, threshold in sorted(shown.items()))


_SIGNED = frozenset({"I8", "I16", "I32", "I64"})


def signs_and_magnitudes(words: Words, dtype: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
    """Of words (unsigned) of this dtype: whether they are negative, and their distance from zero in ULPs."""
    bits = 8 * words.dtype.itemsize
    wide = words.astype(np.uint64)
    top = np.uint64(1 << (bits - 1))
    if dtype in FORMATS:
        return (wide & top) != 0, wide & (top - np.uint64(1))
    if dtype in _SIGNED:
        negative = (wide & top) != 0
        return negative, np.where(negative, (~wide + np.uint64(1)) & np.uint64((1 << bits) - 1), wide)
    return np.zeros(words.size, np.bool_), wide
