"""The acceptance rate of tokens that one distribution sampled and another one judges. Pure.

Source: Sparrow, section 3.1: alpha = sum of min(p, q) over the vocabulary = 1 - total variation, with p from dense and
q from sparse attention at one position. The mean alpha is not informative, because most tokens have 0.999 or more, so
the 5th percentile of each bin of positions is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from p2pcast.ground.errors import UsageError

BIN_TOKENS: Final = 2000
"""Number of positions per bin: 125 pages of 16 tokens."""
PERCENTILE: Final = 5.0
LEAST_TOKENS: Final = 400
"""Fewest tokens of a bin with a percentile: with 400, the share of tokens below the 5th is known to about 0.01."""
CELLS: Final = 1000
"""Cells of each bin's histogram, so that an alpha is known to 0.001."""


def acceptance_rate(dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """Return the rates, with shape (…). ``dense``, ``sparse``: probabilities, with shape (…, vocabulary). If they cover
    only some tokens, the same ones on both sides, the rate is a lower bound. Raises UsageError.
    """
    if dense.shape != sparse.shape:
        raise UsageError(f"distributions of shapes {dense.shape} and {sparse.shape} cannot be compared")
    return np.asarray(np.minimum(dense, sparse).sum(axis=-1, dtype=np.float64)).clip(0.0, 1.0)


class RateBounds(NamedTuple):
    """Bounds on an acceptance rate."""

    least: float
    most: float


def acceptance_bounds(dense: Mapping[int, float], sparse: Mapping[int, float]) -> RateBounds:
    """Compute bounds from only the log-probabilities of each side's most probable tokens. ``dense``, ``sparse``: by
    token id; a missing token is at most as probable as the least probable one given.

    Sparrow uses ``least``, where missing tokens count as 0. Raises UsageError.
    """
    p, q = _probabilities(dense, "dense"), _probabilities(sparse, "sparse")
    both = p.keys() & q.keys()
    least = sum(min(p[token], q[token]) for token in both)
    last_p, last_q = min(p.values()), min(q.values())
    most = least + sum(min(p[token], last_q) for token in p.keys() - both)
    most += sum(min(q[token], last_p) for token in q.keys() - both)
    most += min(max(0.0, 1.0 - sum(p.values())), max(0.0, 1.0 - sum(q.values())))
    return RateBounds(min(1.0, least), min(1.0, most))


def _probabilities(logprobs: Mapping[int, float], name: str) -> dict[int, float]:
    if not logprobs:
        raise UsageError(f"no log-probabilities of {name} attention")
    found = {token: float(np.exp(value)) for token, value in logprobs.items()}
    total = sum(found.values())
    if not all(np.isfinite(value) for value in found.values()) or total > 1.001:
        raise UsageError(f"the log-probabilities of {name} attention are none: they sum to {total:g}")
    return found


class AcceptanceBins:
    """Histograms of acceptance rates by bin of positions; only ``add`` changes them. ``recent``: number of tokens of a
    bin beyond which earlier ones lose weight, or None to weight all equally.
    """

    def __init__(self, bin_tokens: int = BIN_TOKENS, recent: int | None = None) -> None:
        self.bin_tokens, self._recent = bin_tokens, recent
        self._counts: dict[int, np.ndarray] = {}

    def add(self, positions: np.ndarray, alphas: np.ndarray) -> None:
        """Add tokens. ``positions``: where they are in their sequences, prompt included, from 0. ``alphas``: their
        acceptance rates. Both have shape (tokens,). Raises UsageError.
        """
        if positions.shape != alphas.shape or positions.ndim != 1:
            raise UsageError(f"{positions.shape} positions and {alphas.shape} acceptance rates")
        if positions.size and not (positions.min() >= 0 and alphas.min() >= 0 and alphas.max() <= 1):
            raise UsageError("positions are at least 0, and acceptance rates from 0 to 1")
        cells = np.minimum((alphas * CELLS).astype(np.int64), CELLS - 1)
        bins = positions.astype(np.int64) // self.bin_tokens
        for number in np.unique(bins).tolist():
            counts = self._counts.setdefault(number, np.zeros(CELLS))
            counts += np.bincount(cells[bins == number], minlength=CELLS)
            if self._recent is not None and (total := counts.sum()) > self._recent:
                counts *= self._recent / total

    @property
    def bins(self) -> list[int]:
        """Numbers of the bins with tokens, ascending."""
        return sorted(self._counts)

    def tokens(self, number: int) -> int:
        counts = self._counts.get(number)
        return 0 if counts is None else round(counts.sum())

    def percentile(self, number: int) -> float | None:
        """The alpha that PERCENTILE % of the bin's tokens do not exceed, rounded down to a cell; None for a bin with
        fewer than LEAST_TOKENS.
        """
        if self.tokens(number) < LEAST_TOKENS:
            return None
        below = np.cumsum(self._counts[number])
        return float(np.searchsorted(below, PERCENTILE / 100 * below[-1])) / CELLS

    def forget(self, number: int) -> None:
        """Forget a bin's tokens, which no longer count once its budget has changed."""
        self._counts.pop(number, None)


class TailFit(NamedTuple):
    """A Beta distribution of the alphas below TAIL, scaled to [0, 1]. ``share``: the tail's share of all tokens.
    ``ks``: Kolmogorov-Smirnov statistic of the fit.
    """

    a: float
    b: float
    variance: float
    ks: float
    share: float


TAIL: Final = 0.999


def fit_tail(alphas: np.ndarray) -> TailFit | None:
    """Fit the tail of a distribution. Returns None if the tail has fewer than LEAST_TOKENS, if no distribution fits, or
    if scipy (extra ``lab``) is not installed. Source: Sparrow, figure 3.
    """
    try:
        from scipy import stats
    except ImportError:
        return None
    tail = alphas[alphas < TAIL] / TAIL
    if tail.size < LEAST_TOKENS:
        return None
    # The Beta density has no value at its ends.
    tail = tail.clip(1e-6, 1 - 1e-6)
    try:
        a, b, _, _ = stats.beta.fit(tail, floc=0, fscale=1)
    except stats.FitError:
        return None
    fitted = stats.beta(a, b)
    ks = float(stats.kstest(tail, fitted.cdf).statistic)
    return TailFit(float(a), float(b), float(fitted.var()), ks, tail.size / alphas.size)
