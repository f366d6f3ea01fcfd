"""The cost of sampling with dense and with sparse attention, in equivalent floating-point operations. Pure.

Source: Sparrow's cost model. An equivalent operation is a computed one, or memory traffic that takes as long:
``intensity`` operations per value read. As printed in the paper, the two terms for scoring the prompt's pages are not
divided by the page size; ``printed=True`` reproduces that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import PAGE_TOKENS, BudgetSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """``parameters``: of the model. ``samples``: samples of one prompt, which share its cache. ``prompt``, ``answer``:
    tokens. ``kv_width``: size of one token's keys over all layers, in values. ``queries_per_key``: query heads per key
    head. ``intensity``: operations that the device computes while it reads one value. Raises UsageError.
    """

    parameters: float
    samples: int
    prompt: int
    answer: int
    kv_width: int
    queries_per_key: float
    intensity: float

    def __post_init__(self) -> None:
        numbers = (self.parameters, self.samples, self.answer, self.kv_width, self.queries_per_key, self.intensity)
        if not all(math.isfinite(one) and one > 0 for one in numbers) or self.prompt < 0:
            raise UsageError(f"all numbers of a sampling are positive: {self}")


def dense_cost(one: SamplingShape) -> float:
    """C_dense = C_comp + I C_mem."""
    out, n, d = one.answer, one.samples, one.kv_width
    computed = 2 * one.parameters * n * out + one.queries_per_key * (2 * one.prompt + out) * out * n * d
    read = 2 * one.prompt * out * d + n * out**2 * d
    return computed + one.intensity * read


def sparse_cost(
    one: SamplingShape, budget_tokens: float, page_tokens: int = PAGE_TOKENS, *, printed: bool = False
) -> float:
    """C_sparse = C_noscore + C_score, with one budget in tokens for the whole answer."""
    out, n, d, r, i = one.answer, one.samples, one.kv_width, one.queries_per_key, one.intensity
    attended = 2 * n * one.parameters * out + 2 * r * n * d * budget_tokens * out + 2 * i * n * d * budget_tokens * out
    prompt_pages = one.prompt if printed else one.prompt / page_tokens
    scored = 2 * n * prompt_pages * d * out + r * n * d * out**2 / (2 * page_tokens)
    scored += 2 * i * prompt_pages * d * out + i * n * d * out**2 / (2 * page_tokens)
    return attended + scored


def mean_budget(schedule: BudgetSchedule, prompt: int, answer: int) -> float:
    """Number of tokens that a token of the answer attends to on average, in whole pages."""
    if answer < 1 or prompt < 0:
        raise UsageError(f"an answer of {answer} tokens after {prompt}")
    total, position, end = 0.0, prompt, prompt + answer
    while position < end:
        # Within a page and a bin the number of pages is the same.
        stop = min(end, (position // schedule.page_tokens + 1) * schedule.page_tokens)
        stop = min(stop, (position // schedule.bin_tokens + 1) * schedule.bin_tokens)
        total += (stop - position) * schedule.pages(position) * schedule.page_tokens
        position = stop
    return total / answer


def sparse_rollout_cost(
    one: SamplingShape, schedule: BudgetSchedule, *, dense_share: float = 0.0, printed: bool = False
) -> float:
    """C_sparse at the schedule's mean budget. ``dense_share``: the share of layers whose attention stays dense;
    Sparrow's formulas have none.
    """
    budget = mean_budget(schedule, one.prompt, one.answer)
    sparse = sparse_cost(one, budget, schedule.page_tokens, printed=printed)
    return dense_share * dense_cost(one) + (1 - dense_share) * sparse


def speed_up(one: SamplingShape, schedule: BudgetSchedule, *, dense_share: float = 0.0, printed: bool = False) -> float:
    """Dense cost divided by sparse cost; below 1 if scoring costs more than it saves."""
    return dense_cost(one) / sparse_rollout_cost(one, schedule, dense_share=dense_share, printed=printed)
