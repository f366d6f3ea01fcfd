"""What a change of weights looks like, cell by cell: how far values move and which way, and how large the weights are that do.

Steps are counted in ULPs, by 1, 2, 3–4, 5–8 … (bin b holds up to 2^b), away from zero, towards it, or across. Magnitudes of all words and of those that
change are counted eight to a power of two, and exactly on either side of a threshold. Counts of cells add up to those of a tensor. Time is one dense
pass where old values are known, else it goes with the changes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import CONTEXT, FLAT
from p2pcast.codec.floats import FORMATS, Format, signs_and_magnitudes
from p2pcast.codec.kernels import _kernel, readonly

Words = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

AWAY, TOWARDS, ACROSS = 0, 1, 2
WAYS = ("away", "towards", "across")
BINS = 66
NO_THRESHOLD = 0
_MOVE_BITS = 64
MOVE_UNIT = 2.0**_MOVE_BITS
"""Of sums of moves: in it, no sum over 2^60 words overflows, though the words be the largest of f64. Its powers of two cost no bit of any narrower type."""
_EDGES = np.array([1 << b for b in range(64)], np.uint64)
_CHUNK = 1 << 18
"""Changed words that are looked at together: what they take beside themselves is bounded."""


@dataclass(slots=True)
class Magnitudes:
    """Words and changed words (by their old values): by ``Format`` key, and how many lie below a threshold."""

    every: Counts
    those: Counts
    under: int
    under_those: int

    def add(self, other: Magnitudes) -> None:
        self.every = self.every + other.every
        self.those = self.those + other.those
        self.under += other.under
        self.under_those += other.under_those


@dataclass(slots=True)
class Counted:
    """Counts over words of one dtype.

    ``exact``: False where it is not known which words changed; then ``changed`` is the most that can have. ``counted``: changed words in ``ulps``.
    ``ulps[b, way]``: words that moved by more than 2^(b−1), up to 2^b ULPs. ``moved``: Σ |new − old| in value over finite words, in units of ``MOVE_UNIT``. ``magnitudes``: None where old
    values are not known or are no floats.
    """

    words: int = 0
    changed: int = 0
    exact: bool = True
    counted: int = 0
    ulps: Counts = field(default_factory=lambda: np.zeros((BINS, len(WAYS)), np.int64))
    moved: float = 0.0
    magnitudes: Magnitudes | None = None

    def add(self, other: Counted) -> None:
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
    """How many words a cell's payload says that it changes, where it does without its old words (docs/delta-format.md, section 3). Believes it."""
    if codec == FLAT:
        return int.from_bytes(payload[4:8], "little")
    if codec == CONTEXT:
        value = 0
        for shift, byte in zip(range(0, 35, 7), payload[10:15], strict=False):
            value |= (byte & 127) << shift
            if byte < 128:
                return value
    return None


def count_unread(words: int, changed: int | None) -> Counted:
    """Of a cell of which at most the number of changed words is known."""
    return Counted(words, words if changed is None else changed, exact=changed is not None)


def count_steps(words: int, steps: Words) -> Counted:
    """Of a cell of which only the steps (new − old mod 2^bits) are known: words that cross zero pass for others that move as far as integers."""
    out = Counted(words, steps.size, counted=steps.size)
    for begin in range(0, steps.size, _CHUNK):
        negative, far = signs_and_magnitudes(steps[begin : begin + _CHUNK], f"I{8 * steps.dtype.itemsize}")
        out.ulps += _tally(far, np.where(negative, TOWARDS, AWAY))
    return out


def count_cell(dtype: str, old: Words, positions: npt.NDArray[Any], new: Words, threshold: int = NO_THRESHOLD) -> Counted:
    """Of a cell's words ``old``, of which those at ``positions`` become ``new``. ``threshold``: a magnitude (``Format.least_from``)."""
    out = Counted(old.size, positions.size, counted=positions.size)
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
            finite = (here < form.endless) & (there < form.endless)
            before, after = _values(form, here[finite]), _values(form, there[finite])
            out.moved += float(np.abs(np.where(crossed[finite], after + before, after - before)).sum())
    if form is not None:
        every, under = _census_of(form, old, threshold)
        those, under_those = _census_of(form, was, threshold)
        out.magnitudes = Magnitudes(every, those, under, under_those)
    return out


def _tally(far: npt.NDArray[np.uint64], way: npt.NDArray[Any]) -> Counts:
    bins = np.searchsorted(_EDGES, far)
    return np.bincount(bins * len(WAYS) + way, minlength=BINS * len(WAYS)).reshape(BINS, len(WAYS))


def _values(form: Format, magnitudes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """In units of ``MOVE_UNIT``."""
    exponent = (magnitudes >> np.uint64(form.mantissa)).astype(np.int64)
    rest = (magnitudes & np.uint64((1 << form.mantissa) - 1)).astype(np.float64)
    rest += np.where(exponent > 0, float(1 << form.mantissa), 0.0)
    return np.asarray(np.ldexp(rest, np.maximum(exponent, 1) - form.bias - form.mantissa - _MOVE_BITS))


def _census_of(form: Format, words: Words, threshold: int) -> tuple[Counts, int]:
    counts = np.zeros(1 << (form.bits - 1 - form.dropped), np.int64)
    under = _census(readonly(words), np.uint64(65 - form.bits), np.uint64(form.dropped), np.uint64(threshold), counts)
    return counts[: form.keys], int(under)


@_kernel
def _census(words, spare, dropped, threshold, counts):  # type: ignore[no-untyped-def]
    """Counts magnitudes without their dropped bits; returns how many are below the threshold. ``spare``: bits of 64 beside a magnitude."""
    under = 0
    for k in range(words.size):
        magnitude = (np.uint64(words[k]) << spare) >> spare
        counts[magnitude >> dropped] += 1
        under += magnitude < threshold
    return under


def value_at(form: Format, key: float) -> float:
    """|w| at a place among the keys, between two of them in proportion."""
    whole = int(key)
    low, high = form.value(whole << form.dropped), form.value((whole + 1) << form.dropped)
    return low + (key - whole) * (high - low)


def quantile(form: Format, counts: Counts, share: float) -> float | None:
    """|w| below which lies this share of the words, to within an eighth; None where there are none."""
    sums = np.cumsum(counts)
    if not sums.size or not sums[-1]:
        return None
    wanted = share * float(sums[-1])
    key = int(np.searchsorted(sums, wanted))
    before = float(sums[key - 1]) if key else 0.0
    return value_at(form, key + (wanted - before) / float(counts[key]) if counts[key] else float(key))


def below(form: Format, counts: Counts, value: float) -> int:
    """About how many words have |w| < ``value``: of the eighth that it falls into, a part in proportion."""
    magnitude = form.least_from(value)
    key = min(magnitude >> form.dropped, counts.size - 1)
    inside = min(1.0, (magnitude - (key << form.dropped)) / (1 << form.dropped))
    return int(counts[:key].sum()) + round(inside * float(counts[key]))


def by_exponent(form: Format, counts: Counts) -> dict[int, int]:
    """Words by ⌊log₂ |w|⌋, subnormal ones one below the least normal; without zeros (and, of wide types, what is as good as zero)."""
    rest = counts.copy()
    rest[0] = 0
    rows = np.add.reduceat(rest, np.arange(0, rest.size, 1 << (form.mantissa - form.dropped)))
    return {level - form.bias: int(n) for level, n in enumerate(rows.tolist()) if n}
