"""The guard: budgets that are too small grow, by tokens of the present budget alone."""

from __future__ import annotations

import numpy as np
import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS
from p2pcast.sparse.budget_guard import TARGET, BudgetChange, BudgetGuard, GuardOptions
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS, BudgetSchedule

FIRST = BudgetSchedule((29, 61))


def told(guard: BudgetGuard, made_by: BudgetSchedule, number: int, alpha: float, count: int = LEAST_TOKENS) -> int:
    return guard.observe(made_by, np.full(count, number * 2000), np.full(count, alpha))


def test_bins_below_the_target_get_twice_their_pages() -> None:
    guard = BudgetGuard(FIRST)
    assert told(guard, FIRST, 0, 0.9) == LEAST_TOKENS
    told(guard, FIRST, 1, 0.8)
    assert guard.decide() == [BudgetChange(1, pytest.approx(0.8, abs=2e-3), LEAST_TOKENS, 61, 122)]
    # Positions beyond the last bin keep their value.
    assert guard.schedule.values == (29, 122, 61)
    assert guard.decide() == []


def test_a_bin_below_the_floor_is_dense_at_once() -> None:
    guard = BudgetGuard(FIRST)
    told(guard, FIRST, 0, 0.3)
    (change,) = guard.decide()
    assert change.after == DENSE
    assert guard.schedule.pages(1999) == 125
    told(guard, guard.schedule, 0, 0.3)
    assert guard.decide() == []


def test_a_bin_with_all_of_its_pages_gets_no_more() -> None:
    """122 pages and the reserved three are the 2000 positions of bin 0, and not those of bin 1."""
    schedule = BudgetSchedule((122,))
    guard = BudgetGuard(schedule)
    told(guard, schedule, 0, 0.8)
    told(guard, schedule, 1, 0.8)
    assert [change.number for change in guard.decide()] == [1]
    assert guard.percentiles()[0] < TARGET


def test_few_tokens_decide_nothing() -> None:
    guard = BudgetGuard(FIRST)
    told(guard, FIRST, 0, 0.1, LEAST_TOKENS - 1)
    assert guard.decide() == []
    told(guard, FIRST, 0, 0.1, 1)
    assert len(guard.decide()) == 1


def test_tokens_of_an_earlier_schedule_count_in_bins_with_equal_budgets() -> None:
    guard = BudgetGuard(FIRST)
    told(guard, FIRST, 0, 0.7)
    guard.decide()
    assert told(guard, FIRST, 0, 0.1) == 0
    assert told(guard, FIRST, 1, 0.1) == LEAST_TOKENS
    assert [change.number for change in guard.decide()] == [1]
    assert told(guard, BudgetSchedule((58,), bin_tokens=1000), 0, 0.1) == 0


def test_later_bins_change_alone() -> None:
    guard = BudgetGuard(FIRST)
    told(guard, FIRST, 4, 0.7)
    guard.decide()
    assert guard.schedule.values == (29, 61, 61, 61, 122, 61)


def test_positions_beyond_all_bins_are_of_the_last_one() -> None:
    guard = BudgetGuard(FIRST)
    assert told(guard, FIRST, MOST_BINS + 7, 0.7) == LEAST_TOKENS
    assert [(change.number, change.after) for change in guard.decide()] == [(MOST_BINS - 1, 122)]
    assert guard.schedule.values[-2:] == (61, 122)
    assert len(guard.schedule.values) == MOST_BINS
    assert told(guard, FIRST, MOST_BINS + 7, 0.7) == 0


def test_a_budget_of_one_page_recovers_in_a_few_decisions() -> None:
    """An acceptance rate that grows with the budget, as Sparrow's does: from 1 page to the target in 5 decisions."""
    schedule = BudgetSchedule((1,))
    guard = BudgetGuard(schedule, GuardOptions(floor=0.2))
    decisions = 0
    while True:
        pages = guard.schedule.values[0]
        told(guard, guard.schedule, 0, 1 - 0.6 / pages**0.5)
        if not guard.decide():
            break
        decisions += 1
    assert decisions == 5
    assert guard.percentiles()[0] >= TARGET


@pytest.mark.parametrize(("target", "floor"), [(1.0, 0.5), (0.5, 0.6), (float("nan"), 0.1), (0.8, -0.1)])
def test_guards_out_of_range_are_refused(target: float, floor: float) -> None:
    with pytest.raises(UsageError, match="floor <= target"):
        GuardOptions(target, floor)
