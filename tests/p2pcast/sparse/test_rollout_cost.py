"""The cost of sampling against sums over single tokens, and its order by length and budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE, BudgetSchedule
from p2pcast.sparse.rollout_cost import SamplingShape, dense_cost, mean_budget, sparse_cost, speed_up

QWEN = SamplingShape(
    parameters=1.7e9, samples=8, prompt=512, answer=32_000, kv_width=28 * 8 * 128, queries_per_key=2, intensity=250.0
)
"""As Qwen3-1.7B: 28 layers of 8 key heads, 128 wide."""
SMALL = BudgetSchedule((29, 61, 93, 93, 125, 157, 189, 221, 221, 253))


def test_dense_cost_is_the_sum_over_tokens() -> None:
    one = replace(QWEN, prompt=100, answer=400)
    n, d, r, i = one.samples, one.kv_width, one.queries_per_key, one.intensity
    total = 0.0
    for made in range(one.answer):
        own = made + 0.5
        total += 2 * one.parameters * n + 2 * r * n * d * (one.prompt + own) + i * 2 * d * (one.prompt + n * own)
    assert dense_cost(one) == pytest.approx(total, rel=1e-12)


def test_the_printed_form_scores_each_token_of_the_prompt() -> None:
    long = replace(QWEN, prompt=10_000)
    gap = sparse_cost(long, 4096, printed=True) - sparse_cost(long, 4096)
    d, out = long.kv_width, long.answer
    expected = (2 * long.samples + 2 * long.intensity) * d * out * long.prompt * (1 - 1 / 16)
    assert gap == pytest.approx(expected)
    short = replace(QWEN, prompt=0)
    assert sparse_cost(short, 4096, printed=True) == sparse_cost(short, 4096)


def test_the_mean_budget_is_the_sum_over_positions() -> None:
    for schedule in (SMALL, BudgetSchedule((3, 5), 32, 100), BudgetSchedule((DENSE,))):
        for prompt, answer in ((0, 1), (7, 5000), (1999, 2)):
            pages = sum(schedule.pages(position) for position in range(prompt, prompt + answer))
            assert mean_budget(schedule, prompt, answer) == pytest.approx(pages * schedule.page_tokens / answer)


def test_speed_grows_with_length_and_falls_with_the_budget() -> None:
    by_length = [speed_up(replace(QWEN, answer=answer), SMALL) for answer in (1000, 4000, 16_000, 32_000)]
    assert by_length == sorted(by_length)
    by_budget = [speed_up(QWEN, BudgetSchedule((pages,))) for pages in (29, 61, 253, 509)]
    assert by_budget == sorted(by_budget, reverse=True)
    assert speed_up(QWEN, SMALL) > 1
    # Scoring costs something where every page is kept.
    assert speed_up(QWEN, BudgetSchedule((DENSE,))) < 1


@pytest.mark.parametrize("wrong", [{"answer": 0}, {"samples": -1}, {"prompt": -1}, {"intensity": float("nan")}])
def test_numbers_that_are_not_positive_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        replace(QWEN, **wrong)
    with pytest.raises(UsageError):
        mean_budget(SMALL, 0, 0)
