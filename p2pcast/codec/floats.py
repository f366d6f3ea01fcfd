"""Floating-point formats in terms of bits: sign, magnitude, ULPs.

A word's magnitude is its bits without the sign. Neighbouring values have neighbouring magnitudes, and a difference of
one is one ULP. A signed integer's magnitude is its absolute value; unsigned integers have no sign. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]

COUNTED_MANTISSA_BITS = 3
"""Mantissa bits kept when magnitudes are counted: there are eight counts per power of two."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A format with a sign bit, then ``exponent`` bits with this ``bias``, then ``mantissa`` bits.

    Magnitudes from ``first_nonfinite`` on are infinities and NaN.
    """

    exponent: int
    mantissa: int
    bias: int
    first_nonfinite: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def dropped(self) -> int:
        """Number of a magnitude's bits below the counted mantissa bits."""
        return max(0, self.mantissa - COUNTED_MANTISSA_BITS)

    @property
    def keys(self) -> int:
        """Number of different finite magnitudes without the dropped bits."""
        return -(-self.first_nonfinite >> self.dropped)

    @property
    def visible_ratio(self) -> float:
        """Largest ratio of weight to update at which the rounded weight still changes: 2^(mantissa + 1) (bf16: 256).

        Source: PULSE, appendix A.2, equation 5.
        """
        return float(2 << self.mantissa)

    def value(self, magnitude: int) -> float:
        """Return the value of a magnitude."""
        exponent, rest = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if exponent == 0:
            return math.ldexp(rest, 1 - self.bias - self.mantissa)
        return math.ldexp((1 << self.mantissa) + rest, exponent - self.bias - self.mantissa)

    def least_magnitude_of(self, value: float) -> int:
        """Return the lowest magnitude with at least this value; ``first_nonfinite`` if there is none."""
        low, high = -1, self.first_nonfinite
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value(middle) >= value else (middle, high)
        return high


FORMATS: dict[str, FloatFormat] = {
    "F64": FloatFormat(11, 52, 1023, 0x7FF << 52),
    "F32": FloatFormat(8, 23, 127, 0xFF << 23),
    "C64": FloatFormat(8, 23, 127, 0xFF << 23),
    "BF16": FloatFormat(8, 7, 127, 0xFF << 7),
    "F16": FloatFormat(5, 10, 15, 0x1F << 10),
    "F8_E5M2": FloatFormat(5, 2, 15, 0x1F << 2),
    "F8_E4M3": FloatFormat(4, 3, 7, 0x7F),
    "F8_E5M2FNUZ": FloatFormat(5, 2, 16, 0x80),
    "F8_E4M3FNUZ": FloatFormat(4, 3, 8, 0x80),
}
"""Formats by safetensors dtype. FNUZ types use the code of −0 for NaN; that NaN counts as 0 here."""
_PLAIN_EXPONENT = 11
"""Largest exponent at which a power of two is printed as a plain number."""


def thresholds_shown(dtypes: Iterable[str]) -> str:
    """Return the multiple of an update η below which a weight changes, as text for a heading, such as ``256·η``.

    If thresholds differ, the text contains each dtype's. Empty if no dtype is a float.
    """
    found = {dtype: FORMATS[dtype].mantissa + 1 for dtype in dtypes if dtype in FORMATS}
    shown = {dtype: f"{1 << bits if bits <= _PLAIN_EXPONENT else f'2^{bits}'}·η" for dtype, bits in found.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{threshold} ({dtype})" for dtype, threshold in sorted(shown.items()))


_SIGNED = frozenset({"I8", "I16", "I32", "I64"})


def signs_and_magnitudes(words: Words, dtype: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
    """Return whether each word (read as unsigned) of this dtype is negative, and its distance from zero in ULPs."""
    bits = 8 * words.dtype.itemsize
    wide = words.astype(np.uint64)
    top = np.uint64(1 << (bits - 1))
    if dtype in FORMATS:
        return (wide & top) != 0, wide & (top - np.uint64(1))
    if dtype in _SIGNED:
        negative = (wide & top) != 0
        return negative, np.where(negative, (~wide + np.uint64(1)) & np.uint64((1 << bits) - 1), wide)
    return np.zeros(words.size, np.bool_), wide
