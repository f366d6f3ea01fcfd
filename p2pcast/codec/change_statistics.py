"""Statistics of a weight change, cell by cell: distance and direction of each move, and the magnitude of changed
weights.

Steps in ULPs are counted in bins 1, 2, 3–4, 5–8 … (bin b counts steps up to 2^b), by direction: away from zero, towards
zero, or across it. The magnitudes of all words and of changed words are counted in eight bins per power of two, and
exactly on either side of a threshold. The counts of a tensor's cells add up to the tensor's. Takes one dense pass if
the old values are known, otherwise O(changes). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import CONTEXT, FLAT
from p2pcast.codec.floats import FORMATS, FloatFormat, signs_and_magnitudes
from p2pcast.codec.kernels import _kernel, readonly

Words = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

AWAY, TOWARDS, ACROSS = 0, 1, 2
WAYS = ("away", "towards", "across")
BINS = 66
NO_THRESHOLD = 0
_MOVE_BITS = 64
MOVE_UNIT = 2.0**_MOVE_BITS
"""Unit in which moves are summed. In this unit no sum over 2^60 words overflows, not even of the largest f64. Since it
is a power of two, no bit of a narrower type is lost.
"""
_EDGES = np.array([1 << b for b in range(64)], np.uint64)
_CHUNK = 1 << 18
"""Number of changed words processed at a time, which bounds the temporary memory."""


@dataclass(slots=True)
class Magnitudes:
    """Counts of all words and of changed words (by old value), per ``FloatFormat`` key and below a threshold."""

    words: Counts
    changed: Counts
    below_threshold: int
    changed_below: int

    def add(self, other: Magnitudes) -> None:
        self.words = self.words + other.words
        self.changed = self.changed + other.changed
        self.below_threshold += other.below_threshold
        self.changed_below += other.changed_below


@dataclass(slots=True)
class ChangeCounts:
    """Counts of words of one dtype.

    ``exact``: False if ``changed`` is only an upper bound, because the changed words are unknown. ``counted``: number
    of changed words in ``ulps``. ``ulps[b, way]``: words that moved by more than 2^(b−1) and at most 2^b ULPs.
    ``moved``: Σ |new − old| over the values of finite words, in units of ``MOVE_UNIT``. ``magnitudes``: None if the old
    values are unknown or not floats.
    """

    words: int = 0
    changed: int = 0
    exact: bool = True
    counted: int = 0
    ulps: Counts = field(default_factory=lambda: np.zeros((BINS, len(WAYS)), np.int64))
    moved: float = 0.0
    magnitudes: Magnitudes | None = None

    def add(self, other: ChangeCounts) -> None:
        self.words += other.words
        self.changed += other.changed
        self.exact &= other.exact
        self.counted += other.counted
        self.ulps = self.ulps + other.ulps
        self.moved += other.moved
        if self.magnitudes is None:
            self.magnitudes = other.magnitudes
        elif other.magnitudes is not None:
            self.magnitudes.add(other.magnitudes)


def stated_changes(codec: int, payload: bytes) -> int | None:
    """Return the number of changed words that a payload states; None if its codec states none
    (docs/formats/delta-format.md §3).

    The number is not verified.
    """
    if codec == FLAT:
        return int.from_bytes(payload[4:8], "little")
    if codec == CONTEXT:
        value = 0
        for shift, byte in zip(range(0, 35, 7), payload[10:15], strict=False):
            value |= (byte & 127) << shift
            if byte < 128:
                return value
    return None


def count_undecoded(words: int, changed: int | None) -> ChangeCounts:
    """Return the counts of a cell of which at most the number of changed words is known."""
    return ChangeCounts(words, words if changed is None else changed, exact=changed is not None)


def count_steps(words: int, steps: Words) -> ChangeCounts:
    """Return the counts of a cell of which only the steps (new − old mod 2^bits) are known.

    For words that cross zero, the distance is the one between the words read as integers.
    """
    out = ChangeCounts(words, steps.size, counted=steps.size)
    for begin in range(0, steps.size, _CHUNK):
        negative, far = signs_and_magnitudes(steps[begin : begin + _CHUNK], f"I{8 * steps.dtype.itemsize}")
        out.ulps += _tally(far, np.where(negative, TOWARDS, AWAY))
    return out


def count_cell(
    dtype: str, old: Words, positions: npt.NDArray[Any], new: Words, threshold: int = NO_THRESHOLD
) -> ChangeCounts:
    """Return the counts of a cell with the words ``old``, of which those at ``positions`` become ``new``.

    ``threshold``: a magnitude (``FloatFormat.least_magnitude_of``).
    """
    out = ChangeCounts(old.size, positions.size, counted=positions.size)
    form = FORMATS.get(dtype)
    was = old[positions]
    for begin in range(0, positions.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        negative, here = signs_and_magnitudes(was[part], dtype)
        turned, there = signs_and_magnitudes(new[part], dtype)
        crossed = negative != turned
        far = np.where(crossed, here + there, np.where(there > here, there - here, here - there))
        out.ulps += _tally(far, np.where(crossed, ACROSS, np.where(there > here, AWAY, TOWARDS)))
        if form is not None:
            finite = (here < form.first_nonfinite) & (there < form.first_nonfinite)
            before, after = _values(form, here[finite]), _values(form, there[finite])
            out.moved += float(np.abs(np.where(crossed[finite], after + before, after - before)).sum())
    if form is not None:
        words, below_threshold = _census_of(form, old, threshold)
        changed, changed_below = _census_of(form, was, threshold)
        out.magnitudes = Magnitudes(words, changed, below_threshold, changed_below)
    return out


def _tally(far: npt.NDArray[np.uint64], way: npt.NDArray[Any]) -> Counts:
    bins = np.searchsorted(_EDGES, far)
    return np.bincount(bins * len(WAYS) + way, minlength=BINS * len(WAYS)).reshape(BINS, len(WAYS))


def _values(form: FloatFormat, magnitudes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return the values of magnitudes, in units of ``MOVE_UNIT``."""
    exponent = (magnitudes >> np.uint64(form.mantissa)).astype(np.int64)
    rest = (magnitudes & np.uint64((1 << form.mantissa) - 1)).astype(np.float64)
    rest += np.where(exponent > 0, float(1 << form.mantissa), 0.0)
    return np.asarray(np.ldexp(rest, np.maximum(exponent, 1) - form.bias - form.mantissa - _MOVE_BITS))


def _census_of(form: FloatFormat, words: Words, threshold: int) -> tuple[Counts, int]:
    counts = np.zeros(1 << (form.bits - 1 - form.dropped), np.int64)
    below_threshold = _census(
        readonly(words), np.uint64(65 - form.bits), np.uint64(form.dropped), np.uint64(threshold), counts
    )
    return counts[: form.keys], int(below_threshold)


@_kernel
def _census(words, spare, dropped, threshold, counts):  # type: ignore[no-untyped-def]
    """Count magnitudes without their dropped bits in ``counts``, and return how many are below ``threshold``.
    ``spare``: 64 minus the bits of a magnitude.
    """
    below_threshold = 0
    for k in range(words.size):
        magnitude = (np.uint64(words[k]) << spare) >> spare
        counts[magnitude >> dropped] += 1
        below_threshold += magnitude < threshold
    return below_threshold


def value_at(form: FloatFormat, key: float) -> float:
    """Return |w| at a fractional key, interpolated linearly between the two neighbouring keys."""
    whole = int(key)
    low, high = form.value(whole << form.dropped), form.value((whole + 1) << form.dropped)
    return low + (key - whole) * (high - low)


def quantile(form: FloatFormat, counts: Counts, share: float) -> float | None:
    """Return the |w| below which this share of the words is, to within an eighth; None if nothing was counted."""
    sums = np.cumsum(counts)
    if not sums.size or not sums[-1]:
        return None
    wanted = share * float(sums[-1])
    key = int(np.searchsorted(sums, wanted))
    before = float(sums[key - 1]) if key else 0.0
    return value_at(form, key + (wanted - before) / float(counts[key]) if counts[key] else float(key))


def below(form: FloatFormat, counts: Counts, value: float) -> int:
    """Return the approximate number of words with |w| < ``value``, interpolated within the bin that contains it."""
    magnitude = form.least_magnitude_of(value)
    key = min(magnitude >> form.dropped, counts.size - 1)
    inside = min(1.0, (magnitude - (key << form.dropped)) / (1 << form.dropped))
    return int(counts[:key].sum()) + round(inside * float(counts[key]))


def by_exponent(form: FloatFormat, counts: Counts) -> dict[int, int]:
    """Return the number of words per ⌊log₂ |w|⌋; subnormal words count one below the least normal exponent.

    Zeros are left out; so are, in wide types, the other values with key 0.
    """
    rest = counts.copy()
    rest[0] = 0
    rows = np.add.reduceat(rest, np.arange(0, rest.size, 1 << (form.mantissa - form.dropped)))
    return {level - form.bias: int(n) for level, n in enumerate(rows.tolist()) if n}
