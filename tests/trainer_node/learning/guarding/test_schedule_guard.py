"""The schedule that a learner's versions carry: changed by rates of this run alone, and continued by checkpoints."""

from __future__ import annotations

from pathlib import Path

import blake3
import numpy as np
import pytest
import torch

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS
from p2pcast.sparse.budget_guard import BudgetChange, GuardOptions
from p2pcast.sparse.budget_schedule import ALL_PAGES, DENSE, FILE, BudgetSchedule
from trainer_node.learning.guarding.acceptance_scores import AcceptanceRates
from trainer_node.learning.guarding.guard_startup import dense_instead, guard_advice
from trainer_node.learning.guarding.schedule_guard import STATE, ScheduleGuard, change_event
from trainer_node.learning.learner_config import LearnerConfig, SparseTable

FIRST = BudgetSchedule((4, 8))


def name_of(schedule: BudgetSchedule) -> bytes:
    return blake3.blake3(schedule.to_bytes()).digest()


def rates(of: BudgetSchedule, alpha: float, count: int = LEAST_TOKENS, number: int = 0) -> AcceptanceRates:
    return AcceptanceRates(name_of(of), np.full(count, number * of.bin_tokens), np.full(count, alpha))


def present(guard: ScheduleGuard, step: int = 9) -> BudgetSchedule:
    """Of a version that is published now."""
    return BudgetSchedule.from_bytes(guard.files(step)[FILE])


def started() -> ScheduleGuard:
    """After the first version."""
    guard = ScheduleGuard(FIRST, GuardOptions())
    assert present(guard, 0) == FIRST
    return guard


def test_versions_carry_the_schedule_and_its_changes() -> None:
    guard = started()
    (change,) = guard.observe([rates(FIRST, 0.7, 200), rates(FIRST, 0.8, 200)])
    assert change_event(change)["after"] == 8
    assert present(guard).values == (8, 8)
    assert guard.figures() == {
        "judged_tokens": 400,
        "acceptance_mean": pytest.approx(0.75),
        "acceptance": pytest.approx(0.7, abs=2e-3),
    }
    guard.observe([rates(present(guard), 0.9)])
    assert guard.figures()["acceptance"] == pytest.approx(0.9, abs=2e-3)


def test_a_dense_bin_has_no_number_of_pages_in_its_event() -> None:
    assert change_event(BudgetChange(1, 0.2, 400, 8, DENSE)) == {
        "bin": 1, "percentile": 0.2, "tokens": 400, "before": 8, "after": None,
    }  # fmt: skip


def test_rates_of_unknown_schedules_do_not_count() -> None:
    guard = started()
    other = rates(BudgetSchedule((4, 9)), 0.1)
    assert [guard.knows(one.schedule) for one in (other, rates(FIRST, 0.1))] == [False, True]
    assert list(guard.observe([other])) == []
    assert guard.figures()["judged_tokens"] == 0
    assert present(guard) == FIRST


def test_tokens_of_an_earlier_schedule_of_the_run_count_in_other_bins() -> None:
    guard = started()
    guard.observe([rates(FIRST, 0.7)])
    (change,) = guard.observe([rates(FIRST, 0.7, number=1)])
    assert (change.number, present(guard).values) == (1, (8, 16, 8))


def test_without_a_target_rates_are_measured_and_the_schedule_stays() -> None:
    guard = ScheduleGuard(FIRST, GuardOptions(0.0, 0.0))
    guard.files(0)
    assert list(guard.observe([rates(FIRST, 0.1)])) == []
    assert present(guard) == FIRST
    assert guard.figures()["acceptance"] == pytest.approx(0.1, abs=2e-3)


def test_a_dense_run_has_no_file_and_no_state() -> None:
    guard = ScheduleGuard(None, GuardOptions())
    assert (guard.files(0), guard.state(), guard.figures(), list(guard.observe([]))) == ({}, {}, {}, [])
    guard.restore({})
    assert guard.files(1) == {}
    assert guard.schedule_of(1) is None


def test_steps_have_the_schedules_that_their_versions_carried() -> None:
    guard = started()
    guard.files(3)
    guard.observe([rates(FIRST, 0.7)])
    guard.files(5)
    guard.files(6)
    assert [guard.schedule_of(step) for step in (0, 4)] == [FIRST, FIRST]
    assert {guard.schedule_of(step) for step in (5, 6, 7)} == {BudgetSchedule((8, 8))}
    # The run continues from step 4: later versions are not of its lineage.
    guard.files(4)
    assert guard.schedule_of(4) == BudgetSchedule((8, 8))


def grown() -> ScheduleGuard:
    guard = started()
    guard.observe([rates(FIRST, 0.7)])
    guard.files(1)
    return guard


def test_a_checkpoint_continues_with_its_schedule() -> None:
    again = ScheduleGuard(FIRST, GuardOptions())
    again.restore(grown().state())
    assert present(again).values == (8, 8)
    # Rollouts of both schedules may still come.
    assert [one.number for one in again.observe([rates(FIRST, 0.7, number=1)])] == [1]
    assert again.state().keys() == {STATE}


def test_another_file_in_the_configuration_begins_anew() -> None:
    other = BudgetSchedule((6, 9))
    again = ScheduleGuard(other, GuardOptions())
    again.restore(grown().state())
    assert present(again) == other


def test_a_run_without_its_schedule_becomes_dense() -> None:
    again = ScheduleGuard(None, GuardOptions())
    again.restore(grown().state())
    assert present(again).values == (DENSE,)
    once_more = ScheduleGuard(None, GuardOptions())
    once_more.restore(again.state())
    assert present(once_more).values == (DENSE,)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"configured": null, "published": [], "next": {}}', b"\xff"])
def test_a_malformed_state_is_refused(text: bytes) -> None:
    state = {STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)}
    with pytest.raises(UsageError, match="malformed"):
        ScheduleGuard(FIRST, GuardOptions()).restore(state)


@pytest.mark.parametrize("place", ["hub", "folder"])
def test_a_run_without_a_schedule_replaces_one_that_no_guard_would_watch(tmp_path: Path, place: str) -> None:
    if place == "folder":
        (tmp_path / FILE).write_bytes(FIRST.to_bytes())
    guard = ScheduleGuard(None, GuardOptions())
    warning = dense_instead(guard, name_of(FIRST) if place == "hub" else None, tmp_path)
    assert ("newest version" if place == "hub" else str(tmp_path / FILE)) in str(warning)
    assert present(guard) == ALL_PAGES
    once_more = ScheduleGuard(None, GuardOptions())
    once_more.restore(guard.state())
    assert present(once_more) == ALL_PAGES


def test_a_dense_or_guarded_run_replaces_no_schedule(tmp_path: Path) -> None:
    for found in (None, name_of(ALL_PAGES)):
        guard = ScheduleGuard(None, GuardOptions())
        assert dense_instead(guard, found, tmp_path) is None
        assert guard.files(0) == {}
    (tmp_path / FILE).write_bytes(FIRST.to_bytes())
    guard = started()
    assert dense_instead(guard, name_of(BudgetSchedule((6,))), tmp_path) is None
    assert present(guard) == FIRST


def test_a_guard_that_would_count_few_tokens_is_told_of(tmp_path: Path) -> None:
    config = LearnerConfig(sparse=SparseTable(schedule=tmp_path / "sparse_attention.json", staleness=2))
    assert [guard_advice(config, every) for every in (1, 2)] == [None, None]
    assert "Set it to 3" in str(guard_advice(config, 3))
    assert guard_advice(LearnerConfig(), 3) is None
