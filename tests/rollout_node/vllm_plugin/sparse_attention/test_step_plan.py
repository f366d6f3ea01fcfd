"""Which rows of a batch are shortened."""

from __future__ import annotations

import numpy as np

from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.vllm_plugin.sparse_attention.step_plan import plan_step

PAGE = 16


def test_only_rows_that_decode_beyond_their_budget_are_shortened() -> None:
    # Decoding; decoding within the budget; the last token of a prompt; a chunk of a prompt; padding; a later bin.
    seq_lens = np.array([1001, 64, 1001, 1001, 0, 2500])
    query_lens = np.array([1, 1, 1, 40, 0, 1])
    prefilling = np.array([False, False, True, True, False, False])
    plan = plan_step(seq_lens, query_lens, prefilling, BudgetSchedule((1, 5)), PAGE)
    assert plan is not None
    assert plan.rows.tolist() == [0, 5]
    assert plan.pages.tolist() == [63, 157]
    assert plan.kept.tolist() == [4, 8]
    # Three full pages and the 9 tokens of the last; seven and 4.
    assert plan.seq_lens.tolist() == [3 * PAGE + 9, 64, 1001, 1001, 0, 7 * PAGE + 4]
    assert seq_lens.tolist() == [1001, 64, 1001, 1001, 0, 2500]


def test_batch_within_its_budget_has_no_plan() -> None:
    rows = np.arange(1, 65)
    schedule = BudgetSchedule((1,))
    assert plan_step(rows, np.ones(64, int), np.zeros(64, bool), schedule, PAGE) is None
    rows = np.arange(1, 66)
    plan = plan_step(rows, np.ones(65, int), np.zeros(65, bool), schedule, PAGE)
    assert plan is not None
    assert plan.rows.tolist() == [64]
