"""Predicts by length how much faster rollouts are with a sparse-attention schedule. Pure.

Uses Sparrow's cost model, except that the engine's dense layers are counted as dense. Prefills, environments and
rewards are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE_LAYERS, BudgetSchedule
from p2pcast.sparse.model_form import ModelForm
from p2pcast.sparse.rollout_cost import SamplingShape, dense_cost, mean_budget, sparse_rollout_cost


class LengthPrediction(NamedTuple):
    """``answer``: tokens. ``attended``: mean number of tokens that an answer's token attends to in a sparse layer."""

    answer: int
    attended: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class RolloutPrediction:
    """``speed_up``: for equally many answers of each length, their dense costs divided by their sparse costs."""

    by_length: tuple[LengthPrediction, ...]
    speed_up: float


def predicted(
    model: ModelForm,
    schedule: BudgetSchedule,
    answers: Sequence[int],
    *,
    prompt: int,
    samples: int,
    intensity: float,
) -> RolloutPrediction:
    """``answers``, ``prompt``: lengths in tokens. ``samples``: samples of one prompt, which share its cache.
    ``intensity``: operations that a device computes while it reads one value of the cache. Raises UsageError.
    """
    if not answers:
        raise UsageError("a prediction needs the length of an answer")
    dense_share = min(DENSE_LAYERS, model.layers) / model.layers
    rows, dense_sum, sparse_sum = [], 0.0, 0.0
    for answer in answers:
        one = SamplingShape(
            parameters=model.parameters,
            samples=samples,
            prompt=prompt,
            answer=answer,
            kv_width=model.layers * model.width,
            queries_per_key=model.queries_per_key,
            intensity=intensity,
        )
        dense, sparse = dense_cost(one), sparse_rollout_cost(one, schedule, dense_share=dense_share)
        dense_sum, sparse_sum = dense_sum + dense, sparse_sum + sparse
        rows.append(LengthPrediction(answer, mean_budget(schedule, prompt, answer), dense / sparse))
    return RolloutPrediction(tuple(rows), dense_sum / sparse_sum)
