"""The smallest budget of each bin that holds the target."""

from __future__ import annotations

import numpy as np
import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS
from p2pcast.sparse.budget_calibration import LADDER, Calibration
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS


def measured(rates: dict[tuple[int, int], float], count: int = LEAST_TOKENS) -> Calibration:
    """``rates``: by pages and bin, the acceptance rate of all tokens there."""
    found = Calibration(sorted({pages for pages, _ in rates}))
    for (pages, number), alpha in rates.items():
        found.add(pages, np.full(count, number * 2000 + 7), np.full(count, alpha))
    return found


def test_the_smallest_budget_that_holds_the_target_is_taken() -> None:
    found = measured({(29, 0): 0.9, (29, 1): 0.8, (61, 0): 0.95, (61, 1): 0.88, (93, 0): 0.99, (93, 1): 0.97})
    assert found.schedule(0.86).values == (29, 61)
    assert found.schedule(0.96).values == (93, 93)
    assert found.mean(29) == pytest.approx(0.85)
    assert found.tail(29) is not None


def test_budgets_never_fall_and_missing_bins_are_dense() -> None:
    found = measured({(29, 0): 0.5, (29, 1): 0.9, (61, 0): 0.9, (61, 1): 0.9, (61, 3): 0.9})
    assert found.schedule(0.86).values == (61, 61, DENSE, 61)
    assert found.schedule(0.95).values == (DENSE, DENSE, DENSE, DENSE)


def test_prompts_longer_than_the_first_bins_leave_later_bins_their_budgets() -> None:
    found = measured({(29, 2): 0.9, (29, 3): 0.8, (61, 2): 0.95, (61, 3): 0.88})
    assert found.schedule(0.86).values == (DENSE, DENSE, 29, 61)


def test_positions_beyond_the_last_bin_of_a_schedule_count_in_that_bin() -> None:
    found = measured({(29, MOST_BINS - 1): 0.9, (29, MOST_BINS + 5): 0.9})
    assert found.schedule(0.86).values == (*[DENSE] * (MOST_BINS - 1), 29)


def test_without_enough_tokens_there_is_no_schedule() -> None:
    with pytest.raises(UsageError, match="more or longer prompts"):
        measured({(29, 0): 0.9}, LEAST_TOKENS - 1).schedule(0.86)
    assert Calibration(LADDER).mean(1) is None
    assert Calibration(LADDER).tail(1) is None


@pytest.mark.parametrize("budgets", [[], [0, 1], [2, 1], [1, 1]])
def test_ladders_that_do_not_ascend_are_refused(budgets: list[int]) -> None:
    with pytest.raises(UsageError, match="ascending"):
        Calibration(budgets)
