"""Decides which rows of a batch attend to fewer pages in this step, and to how many. It does no I/O.

Only rows that decode one token do, because prompts are dense (Sparrow, section 3.2). A row that keeps all its pages is
left alone, so a budget as long as the sequence is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pcast.sparse.budget_schedule import BudgetSchedule


class StepPlan(NamedTuple):
    """``rows``: indices of the shortened rows, shape (rows,). ``pages``: number of pages of each one's sequence.
    ``kept``: number of pages to which each attends. ``seq_lens``: tokens to which each row attends, shape (batch,).
    """

    rows: np.ndarray
    pages: np.ndarray
    kept: np.ndarray
    seq_lens: np.ndarray


def plan_step(
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    prefilling: np.ndarray,
    schedule: BudgetSchedule,
    page_tokens: int,
) -> StepPlan | None:
    """Return the plan, or None if all rows are dense. ``seq_lens``: each sequence's tokens, including the current ones;
    ``query_lens``: each one's current tokens; ``prefilling``: whether its prompt is still being read; all have shape
    (batch,). ``page_tokens``: tokens per kernel page.
    """
    pages = -(-seq_lens // page_tokens)
    kept = schedule.kept_pages(np.maximum(seq_lens - 1, 0), page_tokens)
    (rows,) = np.nonzero((query_lens == 1) & ~prefilling & (kept < pages))
    if not rows.size:
        return None
    # All kept pages except the last are full.
    lens = seq_lens.copy()
    lens[rows] -= (pages - kept)[rows] * page_tokens
    return StepPlan(rows, pages[rows], kept[rows], lens)
