"""The smallest budget of each bin of positions whose acceptance rates hold a target. Pure.

Source: Sparrow, section 3.2: rollouts are sampled with each of several constant budgets, and for each bin the smallest
one whose 5th percentile holds the target is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import BIN_TOKENS, AcceptanceBins, TailFit, fit_tail
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS, PAGE_TOKENS, BudgetSchedule

LADDER: Final = (1, 5, 13, 29, 45, 61, 93, 125, 157, 189, 221, 253, 317, 381, 445, 509, 637, 893)
"""Pages of the budgets that are tried, besides the reserved ones: 64 to 14336 tokens, most of Sparrow's schedules."""


class BinRow(NamedTuple):
    """``pages``: of a constant budget. ``number``: of the bin. ``percentile``: None for too few tokens."""

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
        """Tokens of one rollout with a constant budget, as for ``AcceptanceBins.add``."""
        # The last bin that a schedule can have holds all later positions.
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
        """Budgets never fall with the position, as far as bins were measured. A bin in which no budget holds the target
        is dense, and so is one without enough tokens, which says nothing of later bins. Raises UsageError when no bin
        has enough tokens.
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
        """Of all acceptance rates with this budget."""
        found = self._alphas[pages]
        return float(np.concatenate(found).mean()) if found else None

    def tail(self, pages: int) -> TailFit | None:
        """The Beta distribution of the acceptance rates below 0.999 with this budget."""
        found = self._alphas[pages]
        return fit_tail(np.concatenate(found)) if found else None
