"""Acceptance rates against their definition, bounds that hold for every distribution, and percentiles by bin."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import (
    BIN_TOKENS,
    CELLS,
    LEAST_TOKENS,
    AcceptanceBins,
    acceptance_bounds,
    acceptance_rate,
    fit_tail,
)


def distribution(seed: int, size: int, sharpness: float) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=size) * sharpness
    exponents = np.exp(scores - scores.max())
    return np.asarray(exponents / exponents.sum())


def test_the_rate_is_one_less_the_total_variation() -> None:
    p = np.stack([distribution(seed, 50, 3.0) for seed in range(20)])
    q = np.stack([distribution(seed + 100, 50, 3.0) for seed in range(20)])
    assert np.allclose(acceptance_rate(p, q), 1 - np.abs(p - q).sum(axis=1) / 2)
    assert np.allclose(acceptance_rate(p, p), 1.0)
    assert acceptance_rate(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


@given(
    st.integers(0, 1000), st.integers(0, 1000), st.integers(2, 40), st.integers(1, 40), st.floats(0.1, 8), st.booleans()
)
def test_the_bounds_hold_the_rate(one: int, other: int, size: int, kept: int, sharpness: float, alike: bool) -> None:
    p = distribution(one, size, sharpness)
    q = 0.9 * p + 0.1 * distribution(other, size, sharpness) if alike else distribution(other, size, sharpness)
    tops = []
    for found in (p, q):
        best = np.argsort(-found, kind="stable")[:kept]
        tops.append({int(token): float(np.log(found[token])) for token in best})
    least, most = acceptance_bounds(*tops)
    assert least - 1e-9 <= acceptance_rate(p, q) <= most + 1e-9
    if kept >= size:
        assert most - least < 1e-9


@pytest.mark.parametrize("wrong", [{}, {1: 0.5}, {1: float("nan")}, {1: -0.1, 2: -0.1}])
def test_values_that_are_no_log_probabilities_are_refused(wrong: dict[int, float]) -> None:
    with pytest.raises(UsageError, match="log-probabilities of sparse attention"):
        acceptance_bounds({1: -0.5}, wrong)


def test_distributions_of_other_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"shapes \(2,\) and \(3,\)"):
        acceptance_rate(np.ones(2), np.ones(3))


@given(st.lists(st.tuples(st.integers(0, 3 * BIN_TOKENS), st.floats(0, 1)), min_size=1, max_size=50), st.integers(1, 5))
def test_percentiles_agree_with_numpy(rows: list[tuple[int, float]], parts: int) -> None:
    positions = np.array([position for position, _ in rows] * LEAST_TOKENS)
    alphas = np.array([alpha for _, alpha in rows] * LEAST_TOKENS)
    bins = AcceptanceBins()
    for part in range(parts):
        bins.add(positions[part::parts], alphas[part::parts])
    assert bins.bins == sorted({position // BIN_TOKENS for position, _ in rows})
    for number in bins.bins:
        inside = alphas[positions // BIN_TOKENS == number]
        exact = float(np.percentile(inside, 5, method="inverted_cdf"))
        found = bins.percentile(number)
        assert found is not None
        assert exact - 2 / CELLS <= found <= exact + 1e-9
        assert bins.tokens(number) == inside.size


def test_a_bin_with_few_tokens_has_no_percentile() -> None:
    bins = AcceptanceBins()
    bins.add(np.zeros(LEAST_TOKENS - 1, np.int64), np.ones(LEAST_TOKENS - 1))
    assert bins.percentile(0) is None
    bins.add(np.zeros(1, np.int64), np.ones(1))
    assert bins.percentile(0) == (CELLS - 1) / CELLS
    bins.forget(0)
    assert (bins.percentile(0), bins.bins, bins.tokens(0)) == (None, [], 0)


@pytest.mark.parametrize(
    ("positions", "alphas"), [([0, 1], [0.5]), ([-1], [0.5]), ([0], [1.5]), ([0], [-0.5]), ([0], [float("nan")])]
)
def test_wrong_tokens_are_refused(positions: list[int], alphas: list[float]) -> None:
    with pytest.raises(UsageError):
        AcceptanceBins().add(np.array(positions), np.array(alphas))


def test_the_tail_is_fitted_by_a_beta_distribution() -> None:
    drawn = np.random.default_rng(1).beta(2.0, 0.7, size=20_000) * 0.999
    fit = fit_tail(np.concatenate([drawn, np.ones(80_000)]))
    assert fit is not None
    assert fit.share == pytest.approx(0.2)
    assert (fit.a, fit.b) == pytest.approx((2.0, 0.7), rel=0.05)
    assert fit.ks < 0.04
    assert fit_tail(np.ones(1000)) is None


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_equal_rates_have_no_fitted_tail(alpha: float) -> None:
    assert fit_tail(np.full(1000, alpha)) is None


def test_measurement_without_scipy_has_no_fitted_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration needs only the extra of its engine, which does not bring scipy."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert fit_tail(np.full(1000, 0.5)) is None
