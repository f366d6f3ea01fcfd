"""Schedules of pages by position: Sparrow's own, their limits, and documents of every form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE, MOST_BINS, BudgetSchedule

SMALL = BudgetSchedule((29, 61, 93, 93, 125, 157, 189, 221, 221, 253))
"""Of Qwen3-1.7B for a 5th percentile of 0.86, as Sparrow's authors use it."""


def test_sparrows_schedule_keeps_its_budgets() -> None:
    assert SMALL.budget_tokens(0) == 512
    assert SMALL.budget_tokens(9) == 4096
    assert SMALL.pages(1999) == 32
    assert SMALL.pages(2000) == 64
    assert SMALL.pages(10**6) == 256
    assert [SMALL.pages(position) for position in (0, 511, 512)] == [1, 32, 32]


def test_a_dense_bin_keeps_all_pages() -> None:
    schedule = SMALL.with_value(1, DENSE)
    assert schedule.pages(3999) == 250
    assert schedule.pages(4000) == 96
    assert schedule.values[0] == 29
    assert schedule.values[2:] == SMALL.values[2:]


def test_a_changed_bin_changes_no_other() -> None:
    schedule = BudgetSchedule((29, 61))
    changed = {number: schedule.with_value(number, 5) for number in (0, 1, 4, MOST_BINS - 1)}
    assert changed[1].values == (29, 5, 61)
    assert changed[4].values == (29, 61, 61, 61, 5, 61)
    for number, found in changed.items():
        others = set(range(MOST_BINS)) - {number}
        assert found.value(number) == 5
        assert all(found.value(other) == schedule.value(other) for other in others)
    with pytest.raises(UsageError, match="bins"):
        schedule.with_value(MOST_BINS, 5)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.sampled_from([16, 32, 64]))
def test_kept_pages_exist(position: int, values: list[int], page: int) -> None:
    schedule = BudgetSchedule(tuple(values), page)
    there = position // page + 1
    assert schedule.pages(position) == min(there, values[min(position // 2000, len(values) - 1)] + 3)
    assert BudgetSchedule.read(schedule.document()) == schedule


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"values": [], "page_tokens": 16, "bin_tokens": 2000},
        {"values": [0], "page_tokens": 16, "bin_tokens": 2000},
        {"values": [True], "page_tokens": 16, "bin_tokens": 2000},
        {"values": [1.5], "page_tokens": 16, "bin_tokens": 2000},
        {"values": "12", "page_tokens": 16, "bin_tokens": 2000},
        {"values": [DENSE + 1], "page_tokens": 16, "bin_tokens": 2000},
        {"values": [1] * 513, "page_tokens": 16, "bin_tokens": 2000},
        {"values": [1], "page_tokens": 0, "bin_tokens": 2000},
        {"values": [1], "page_tokens": 16, "bin_tokens": 8},
        {"values": [DENSE], "page_tokens": 1 << 62, "bin_tokens": 1 << 62},
    ],
)
def test_documents_of_another_form_are_refused(document: Any) -> None:
    with pytest.raises(UsageError):
        BudgetSchedule.read(document)


def test_caches_with_pages_of_another_size_hold_the_budget() -> None:
    schedule = BudgetSchedule((1, 29, 61))
    positions = np.array([0, 1999, 2000, 3999, 4000, 90_000])
    assert schedule.kept_pages(positions, 16).tolist() == [4, 4, 32, 32, 64, 64]
    assert schedule.kept_pages(positions, 32).tolist() == [4, 4, 16, 16, 32, 32]
    assert schedule.kept_pages(positions, 128).tolist() == [4, 4, 4, 4, 8, 8]
    assert BudgetSchedule((DENSE,)).kept_pages(np.array([1 << 20]), 16)[0] > (1 << 20) // 16


def test_unknown_keys_of_a_file_are_ignored() -> None:
    schedule = BudgetSchedule((29, 61))
    assert BudgetSchedule.from_bytes(schedule.to_bytes()) == schedule
    spaced = b'{"values": [29, 61],\n "bin_tokens": 2000, "page_tokens": 16, "note": 1}'
    assert BudgetSchedule.from_bytes(spaced) == schedule


NO_SCHEDULES = [b"", b"[]", b"NaN", b"\xff", b"[" * 9000, b'{"values": [1]}']
NO_SCHEDULES += [
    b'{"values": [%s], "page_tokens": 16, "bin_tokens": 2000}' % values
    for values in (b"", b"true", b"1," * 9000 + b"1")
]


@pytest.mark.parametrize("contents", NO_SCHEDULES)
def test_files_that_hold_no_schedule_are_refused(contents: bytes) -> None:
    with pytest.raises(UsageError):
        BudgetSchedule.from_bytes(contents)
