"""When a bar's paired runs count as worse or better, and when they give no verdict."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.guard.paired_ratios import FEWEST, NOISE, SLIGHT, Figure, RatioSpread, against, ratios, row, verdict

LESS, MORE, EXACT = Figure("s"), Figure("GB/s", less=False), Figure("bytes", exact=True)
VALUES = st.floats(0.001, 1000)


def paired(*found: float) -> tuple[list[float], list[float]]:
    """Pairs with these ratios, on a machine whose speed changes between pairs."""
    moods = [1.0, 3.0, 0.5, 2.0, 10.0, 0.1, 7.0][: len(found)]
    return [ratio * mood for ratio, mood in zip(found, moods, strict=True)], moods


def test_slowdown_of_both_runs_cancels() -> None:
    ours, theirs = paired(1.2, 1.2, 1.2, 1.2, 1.2)
    assert verdict(LESS, ours, theirs) == "worse"
    assert verdict(MORE, ours, theirs) == "better"
    ours, theirs = paired(1.0, 1.0, 1.0, 1.0, 1.0)
    assert verdict(LESS, ours, theirs) == verdict(MORE, ours, theirs) == "same"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((1.06, 1.07, 1.08, 1.09, 1.1), "worse"),
        ((0.94, 0.93, 0.92, 0.91, 0.9), "better"),
        ((1.04, 1.07, 1.08, 1.09, 1.1), "worse"),  # one pair decides nothing against four
        ((1.04, 1.04, 1.08, 1.09, 1.1), "same"),  # a quartile is within the noise
        ((0.5, 0.9, 1.0, 1.1, 2.0), "same"),  # noisy
        ((1.2, 1.2, 0.8, 0.8, 1.0), "same"),
        ((9.0, 9.0, 9.0, 9.0), "too few pairs"),
        ((1.0,), "too few pairs"),
    ],
)
def test_the_rule(found: tuple[float, ...], said: str) -> None:
    assert verdict(LESS, *paired(*found)) == said


@given(st.lists(st.tuples(VALUES, VALUES), min_size=FEWEST, max_size=15))
def test_verdict_is_symmetric_and_ignores_noise(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    said, middle = verdict(LESS, ours, theirs), median(a / b for a, b in pairs)
    if said != "same":
        assert (middle > 1 + NOISE) == (said == "worse")
        assert (middle < 1 - NOISE) == (said == "better")
    assert verdict(MORE, ours, theirs) == {"worse": "better", "better": "worse", "same": "same"}[said]


def test_any_difference_of_exact_figures_is_reported() -> None:
    assert verdict(EXACT, [1000], [1000]) == "same"
    assert verdict(EXACT, [1_000_001], [1_000_000]) == verdict(EXACT, [999_999], [1_000_000]) == "changed"
    assert verdict(EXACT, [1000 * (1 + 2 * SLIGHT)], [1000]) == "worse"
    assert verdict(EXACT, [900], [1000]) == "better"
    assert verdict(EXACT, [0, 0, 7], [0, 0, 0]) == "worse"
    assert verdict(EXACT, [0], [0]) == "same"


def test_ratios_to_zero() -> None:
    assert ratios([0, 1, 0], [0, 0, 1]) == [1.0, math.inf, 0.0]


def test_a_spread_is_median_and_quartiles() -> None:
    assert RatioSpread.of([4, 1, 3, 2, 5]) == RatioSpread(3, 2, 4)
    assert RatioSpread.of([7]) == RatioSpread(7, 7, 7)
    with pytest.raises(ValueError, match="no values"):
        RatioSpread.of([])


def test_a_record_counts_only_where_the_two_lie_apart() -> None:
    recorded = RatioSpread(1.0, 0.98, 1.02)
    assert against(LESS, RatioSpread(1.2, 1.1, 1.3), recorded) == "worse"
    assert against(MORE, RatioSpread(1.2, 1.1, 1.3), recorded) == "better"
    assert against(LESS, RatioSpread(0.8, 0.7, 0.9), recorded) == "better"
    assert against(LESS, RatioSpread(1.2, 1.01, 1.3), recorded) == "same"  # the ranges touch
    assert against(LESS, RatioSpread(1.04, 1.03, 1.05), recorded) == "same"  # disjoint, but by less than the noise
    assert against(EXACT, RatioSpread(1.0, 1.0, 1.0), recorded) == "same"
    assert against(EXACT, RatioSpread(1.0001, 1.0, 1.0), recorded) == "changed"


def test_row_has_medians_quartiles_and_verdict() -> None:
    made = row(LESS, *paired(1.1, 1.2, 1.3, 1.4, 1.5))
    assert made["ratio"] == pytest.approx([1.3, 1.2, 1.4])
    assert (made["pairs"], made["verdict"], made["unit"]) == (5, "worse", "s")
