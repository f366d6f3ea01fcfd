"""The verdict on a bar's paired runs: better, worse, or the same within noise. Pure.

Each pair gives one ratio, this tree's over the baseline's, of two consecutive runs, so slow changes of the machine
cancel. The median and the quartiles of the ratios count. A figure is worse (or better) only with at least ``FEWEST``
pairs. The whole range between the quartiles must also lie beyond ``NOISE`` on that side of 1. ``exact`` figures (bytes)
are compared directly: any difference is reported, as "changed" up to ``SLIGHT``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final, Literal

NOISE: Final = 0.05
"""Ratio minus 1: above the difference between two runs of the same code on a quiet machine."""
SLIGHT: Final = 0.001
"""Ratio minus 1 of exact figures, for example an additional field in a signed record."""
FEWEST: Final = 5
"""Least number of pairs with meaningful quartiles."""

Verdict = Literal["better", "worse", "same", "changed", "too few pairs"]


@dataclass(frozen=True, slots=True)
class Figure:
    """``less``: a smaller value is better. ``exact``: the same code gives the same number."""

    unit: str
    less: bool = True
    exact: bool = False


@dataclass(frozen=True, slots=True)
class RatioSpread:
    """``low`` and ``high``: the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RatioSpread:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("no values")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @property
    def row(self) -> list[float]:
        return [float(f"{value:.9g}") for value in (self.median, self.low, self.high)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each pair. Two zeros are equal; a nonzero value is infinitely more than zero."""
    return [1.0 if a == b else a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)]


def verdict(figure: Figure, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """The verdict on the figure's values by pairs."""
    found = ratios(ours, theirs)
    if figure.exact:
        return _exact(figure, max(found, key=lambda ratio: abs(ratio - 1.0)))
    if len(found) < FEWEST:
        return "too few pairs"
    spread = RatioSpread.of(found)
    return _side(figure, more=spread.low > 1 + NOISE, fewer=spread.high < 1 - NOISE)


def against(figure: Figure, now: RatioSpread, recorded: RatioSpread) -> Verdict:
    """Compares this run's ratios with those of an earlier run of the same form against the same baseline. A difference
    needs disjoint quartile ranges, and medians that differ by ``NOISE``.
    """
    if figure.exact:
        return _exact(figure, ratios([now.median], [recorded.median])[0])
    change = now.median / recorded.median if recorded.median else 1.0
    return _side(
        figure,
        more=now.low > recorded.high and change > 1 + NOISE,
        fewer=now.high < recorded.low and change < 1 - NOISE,
    )


def _exact(figure: Figure, ratio: float) -> Verdict:
    side = _side(figure, more=ratio > 1 + SLIGHT, fewer=ratio < 1 - SLIGHT)
    return "changed" if side == "same" and ratio != 1.0 else side


def _side(figure: Figure, *, more: bool, fewer: bool) -> Verdict:
    if more:
        return "worse" if figure.less else "better"
    if fewer:
        return "better" if figure.less else "worse"
    return "same"


def row(figure: Figure, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The row of the record: medians, the ratio's median and quartiles, the verdict."""
    return {
        "unit": figure.unit,
        "pairs": len(ours),
        "ours": RatioSpread.of(ours).row[0],
        "baseline": RatioSpread.of(theirs).row[0],
        "ratio": RatioSpread.of(ratios(ours, theirs)).row,
        "verdict": verdict(figure, ours, theirs),
    }
