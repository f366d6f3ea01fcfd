"""The guard of sparse attention: increases budgets before sparse rollouts harm the learner. Pure.

Source: Sparrow, section 3.1: keep the 5th percentile of the acceptance rate at 0.86 or more in each bin of positions. A
bin below the target gets twice its pages, and all pages once it is below the floor. A bin that keeps all its pages
cannot get more, whatever its rates. Budgets never decrease here: that takes a new calibration. Only tokens that were
sampled with a bin's current value count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS, AcceptanceBins
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS, RESERVED, BudgetSchedule

TARGET: Final = 0.86
FLOOR: Final = 0.5
RECENT: Final = 10 * LEAST_TOKENS
"""Number of a bin's tokens that count in full, because tokens of a much older model are not informative."""


class BudgetChange(NamedTuple):
    """``number``: the bin's number. ``percentile``: the 5th, of ``tokens`` tokens. ``before``, ``after``: its pages;
    DENSE for all.
    """

    number: int
    percentile: float
    tokens: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """``target``: lowest 5th percentile of a bin. ``floor``: below it, the bin is dense at once. Raises UsageError."""

    target: float = TARGET
    floor: float = FLOOR

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.target < 1:
            raise UsageError(f"a guard has 0 <= floor <= target < 1, not {self.floor} and {self.target}")


class BudgetGuard:
    """The guard of one run, and the only writer of ``schedule``."""

    def __init__(self, schedule: BudgetSchedule, options: GuardOptions | None = None) -> None:
        self.schedule = schedule
        self._options = options or GuardOptions()
        self._bins = AcceptanceBins(schedule.bin_tokens, RECENT)

    def observe(self, made_by: BudgetSchedule, positions: np.ndarray, alphas: np.ndarray) -> int:
        """Add the tokens of one rollout, which ``made_by`` sampled, as ``AcceptanceBins.add`` does. Returns how many of
        them count. Raises UsageError.
        """
        if (made_by.bin_tokens, made_by.page_tokens) != (self.schedule.bin_tokens, self.schedule.page_tokens):
            return 0
        alike = np.array([made_by.value(n) == self.schedule.value(n) for n in range(MOST_BINS)])
        # The last bin that a schedule can have includes all later positions.
        positions = np.minimum(positions, MOST_BINS * self.schedule.bin_tokens - 1)
        counted = alike[positions // self.schedule.bin_tokens]
        self._bins.add(positions[counted], alphas[counted])
        return int(np.count_nonzero(counted))

    def percentiles(self) -> dict[int, float]:
        """The 5th percentiles of the bins with enough tokens."""
        found = {number: self._bins.percentile(number) for number in self._bins.bins}
        return {number: percentile for number, percentile in found.items() if percentile is not None}

    def decide(self) -> Sequence[BudgetChange]:
        """Update ``schedule``, and return the changes. Tokens of the old values are forgotten."""
        changes = []
        for number, percentile in self.percentiles().items():
            before = self.schedule.value(number)
            if percentile >= self._options.target or _is_dense(self.schedule, number):
                continue
            after = DENSE if percentile < self._options.floor else min(DENSE, 2 * before)
            changes.append(BudgetChange(number, percentile, self._bins.tokens(number), before, after))
        for change in changes:
            self.schedule = self.schedule.with_value(change.number, change.after)
            self._bins.forget(change.number)
        return changes


def _is_dense(schedule: BudgetSchedule, number: int) -> bool:
    """Whether a bin's value keeps all pages of its positions, so that more would change nothing."""
    value = schedule.value(number)
    within = schedule.page_tokens * (value + RESERVED) >= schedule.bin_tokens * (number + 1)
    return value == DENSE or (within and number < MOST_BINS - 1)
