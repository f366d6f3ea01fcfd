"""Finds the smallest budget of each bin of positions at which acceptance rates meet a target. Pure.

Source: Sparrow, section 3.2: rollouts are sampled with each of several constant budgets, and each bin gets the smallest
one whose 5th percentile meets the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import BIN_TOKENS, AcceptanceBins, TailFit, fit_tail
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS, PAGE_TOKENS, BudgetSchedule

LADDER: Final = (1, 5, 13, 29, 45, 61, 93, 125, 157, 189, 221, 253, 317, 381, 445, 509, 637, 893)
"""Budgets to try, in pages without the reserved ones: 64 to 14336 tokens, most of Sparrow's schedules."""


class BinRow(NamedTuple):
    """``pages``: the constant budget. ``number``: the bin's number. ``percentile``: None if tokens are too few."""

    pages: int
    number: int
    tokens: int
    percentile: float | None


class Calibration:
    """``budgets``: constant budgets in pages, ascending."""

    def __init__(self, budgets: Sequence[int], *, page_tokens: int = PAGE_TOKENS, bin_tokens: int = BIN_TOKENS) -> None:
        if list(budgets) != sorted(set(budgets)) or not budgets or budgets[0] < 1:
            raise UsageError("budgets are different numbers of pages, at least 1, in ascending order")
        self.budgets = tuple(budgets)
        self._page_tokens, self.bin_tokens = page_tokens, bin_tokens
        self._bins: Mapping[int, AcceptanceBins] = {pages: AcceptanceBins(bin_tokens) for pages in budgets}
        self._alphas: dict[int, list[np.ndarray]] = {pages: [] for pages in budgets}

    def add(self, pages: int, positions: np.ndarray, alphas: np.ndarray) -> None:
        """Add the tokens of one rollout with a constant budget, as ``AcceptanceBins.add`` does."""
        # The last bin that a schedule can have includes all later positions.
        positions = np.minimum(positions, MOST_BINS * self.bin_tokens - 1)
        self._bins[pages].add(positions, alphas)
        self._alphas[pages].append(np.asarray(alphas, np.float64))

    def constant(self, pages: int) -> BudgetSchedule:
        return BudgetSchedule((pages,), self._page_tokens, self.bin_tokens)

    def rows(self) -> list[BinRow]:
        return [
            BinRow(pages, number, bins.tokens(number), bins.percentile(number))
            for pages, bins in self._bins.items()
            for number in bins.bins
        ]

    def schedule(self, target: float) -> BudgetSchedule:
        """Return a schedule. Budgets never decrease with the position, as far as bins were measured. A bin where no
        budget meets the target is dense. So is a bin with too few tokens, which does not affect later bins. Raises
        UsageError if no bin has enough tokens.
        """
        held: dict[int, list[int]] = {}
        measured = [row for row in self.rows() if row.percentile is not None]
        if not measured:
            raise UsageError("no bin has enough tokens for a percentile: give more or longer prompts")
        for row in measured:
            if row.percentile is not None and row.percentile >= target:
                held.setdefault(row.number, []).append(row.pages)
        numbers, values, least = {row.number for row in measured}, [], 1
        for number in range(max(numbers) + 1):
            if number in numbers:
                least = max(least, min(held.get(number, [DENSE])))
            values.append(least if number in numbers else DENSE)
        return BudgetSchedule(tuple(values), self._page_tokens, self.bin_tokens)

    def mean(self, pages: int) -> float | None:
        """The mean of all acceptance rates with this budget."""
        found = self._alphas[pages]
        return float(np.concatenate(found).mean()) if found else None

    def tail(self, pages: int) -> TailFit | None:
        """The Beta distribution of the acceptance rates below 0.999 with this budget."""
        found = self._alphas[pages]
        return fit_tail(np.concatenate(found)) if found else None
