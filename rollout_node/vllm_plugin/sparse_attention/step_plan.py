"""Which rows of a batch attend to fewer pages in this step, and to how many. Pure.

Only rows that decode one token do: prompts are dense (Sparrow, section 3.2). A row that keeps all of its pages is left
alone, so that a budget as long as the sequence is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pcast.sparse.budget_schedule import BudgetSchedule


class StepPlan(NamedTuple):
    """``rows``: numbers of the shortened rows, of shape (rows,). ``pages``: pages that hold each of their sequences.
    ``kept``: pages that each attends to. ``seq_lens``: tokens that each row of the batch attends to, of shape (batch,).
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
    """None if all rows are dense. ``seq_lens``: tokens of each sequence, the present ones included; ``query_lens``:
    present tokens of each; ``prefilling``: whether its prompt is still being read; all of shape (batch,).
    ``page_tokens``: of the kernel's pages.
    """
    pages = -(-seq_lens // page_tokens)
    kept = schedule.kept_pages(np.maximum(seq_lens - 1, 0), page_tokens)
    (rows,) = np.nonzero((query_lens == 1) & ~prefilling & (kept < pages))
    if not rows.size:
        return None
    # All kept pages but the last are full.
    lens = seq_lens.copy()
    lens[rows] -= (pages - kept)[rows] * page_tokens
    return StepPlan(rows, pages[rows], kept[rows], lens)
