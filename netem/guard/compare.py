"""What a bar's paired runs say: better, worse, or the same within noise. Pure.

The rule. Each pair gives one ratio, ours over the baseline's, of two runs that followed each other, so that what the machine did to both cancels. Of the ratios
count the median and the quartiles. A figure is worse (or better) only if at least ``FEWEST`` pairs were run, and the whole range between the quartiles lies beyond
``NOISE`` on that side of 1. Figures that are ``exact`` (bytes) are compared as they are: any difference is told, as "changed" up to ``SLIGHT``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final, Literal

NOISE: Final = 0.05
"""Of a ratio: what two runs of one code differ by on a quiet machine, with room."""
SLIGHT: Final = 0.001
"""Of a ratio of exact figures: a field more in a signed record, say."""
FEWEST: Final = 5
"""Pairs: of fewer the quartiles say nothing."""

Verdict = Literal["better", "worse", "same", "changed", "too few pairs"]


@dataclass(frozen=True, slots=True)
class Figure:
    """``less``: less is better. ``exact``: the same code gives the same number."""

    unit: str
    less: bool = True
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """``low`` and ``high``: the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for none."""
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
    """Of each pair. Two zeros are equal; what is not zero is infinitely more than zero."""
    return [1.0 if a == b else a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)]


def verdict(figure: Figure, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Of the figure's values by pairs."""
    found = ratios(ours, theirs)
    if figure.exact:
        return _exact(figure, max(found, key=lambda ratio: abs(ratio - 1.0)))
    if len(found) < FEWEST:
        return "too few pairs"
    spread = Spread.of(found)
    return _side(figure, more=spread.low > 1 + NOISE, fewer=spread.high < 1 - NOISE)


def against(figure: Figure, now: Spread, recorded: Spread) -> Verdict:
    """The ratios of this run beside those of an earlier run of the same form, against the same baseline: they have to lie apart, and their medians by ``NOISE``."""
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
    """As it is recorded: medians, the ratio's median and quartiles, the verdict."""
    return {
        "unit": figure.unit,
        "pairs": len(ours),
        "ours": Spread.of(ours).row[0],
        "baseline": Spread.of(theirs).row[0],
        "ratio": Spread.of(ratios(ours, theirs)).row,
        "verdict": verdict(figure, ours, theirs),
    }
