"""Predicted speed-ups beside those that Sparrow measured, and their sums over lengths."""

from __future__ import annotations

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE, BudgetSchedule
from p2pcast.sparse.model_form import ModelForm
from p2pcast.sparse.rollout_prediction import RolloutPrediction, predicted

H200 = 2 * 989e12 / 4.8e12
"""Operations in bfloat16 by values of two bytes: NVIDIA's data sheet, without structured sparsity."""
SPARROW = {
    "1.7B": (
        ModelForm(1.72e9, 28, 1024, 2),
        BudgetSchedule((29, 61, 93, 93, 125, 157, 189, 221, 221, 253)),
        2.21,
    ),
    "4B": (
        ModelForm(4.02e9, 36, 1024, 4),
        BudgetSchedule((29, 45, 61, 77, 93, 125, 157, 221, 253, 253, *[317] * 4, *[381] * 4, 509)),
        2.41,
    ),
    "8B": (
        ModelForm(7.57e9, 36, 1024, 4),
        BudgetSchedule((29, 45, 61, 77, 125, 157, 189, *[253] * 4, *[317] * 6, 385, 445)),
        2.06,
    ),
    "14B": (
        ModelForm(13.99e9, 40, 1024, 5),
        BudgetSchedule((29, 45, 77, 125, 253, *[381] * 10, 509, 637, 637, 893)),
        1.48,
    ),
}
"""Qwen3's figures, the schedules of target 0.86, and the speed-ups of Table 2: AIME24 × 8, at most 32 K tokens."""


def sparrow(size: str, *answers: int) -> RolloutPrediction:
    model, schedule, _ = SPARROW[size]
    return predicted(model, schedule, answers, prompt=200, samples=8, intensity=H200)


@pytest.mark.parametrize("size", SPARROW)
def test_predictions_exceed_sparrows_measurements_by_at_most_a_third(size: str) -> None:
    """At half of the longest answer; the paper does not give the mean."""
    measured = SPARROW[size][2]
    assert 1.1 < sparrow(size, 16_000).speed_up / measured < 1.4


def test_predictions_keep_the_order_of_the_models_at_half_length() -> None:
    by_size = {size: sparrow(size, 16_000).speed_up for size in SPARROW}
    assert sorted(SPARROW, key=lambda size: SPARROW[size][2]) == sorted(by_size, key=lambda size: by_size[size])


def test_lengths_are_weighted_by_their_cost() -> None:
    short, long = (sparrow("4B", answer).speed_up for answer in (2000, 32_000))
    both = sparrow("4B", 2000, 32_000)
    assert [row.speed_up for row in both.by_length] == [short, long]
    assert [row.answer for row in both.by_length] == [2000, 32_000]
    assert (short + long) / 2 < both.speed_up < long


def test_two_layers_stay_dense() -> None:
    """A model of two layers gains nothing."""
    _, schedule, _ = SPARROW["1.7B"]
    small = predicted(ModelForm(1e6, 2, 1024, 2), schedule, [32_000], prompt=0, samples=8, intensity=H200)
    assert small.speed_up == pytest.approx(1)
    large = predicted(ModelForm(1e6, 200, 1024, 2), schedule, [32_000], prompt=0, samples=8, intensity=H200)
    assert large.speed_up > 3


def test_a_dense_schedule_gains_nothing() -> None:
    found = predicted(SPARROW["4B"][0], BudgetSchedule((DENSE,)), [8000], prompt=0, samples=8, intensity=H200)
    assert found.speed_up < 1
    assert found.by_length[0].attended == pytest.approx(4008, rel=1e-3)


def test_no_length_is_refused() -> None:
    with pytest.raises(UsageError, match="length"):
        predicted(SPARROW["4B"][0], SPARROW["4B"][1], [], prompt=0, samples=8, intensity=H200)
