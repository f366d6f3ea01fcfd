"""The learner's sparse forward pass, beside an independent reference that decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.research.sparse_sampler import sparse_answers
from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE, BudgetSchedule
from tests.rollout_node.vllm.sparse_reference import Reference
from tests.trainer_node.learning.distillation.sparse_rows import (
    ALONE,
    PAGE,
    SCHEDULE,
    VERSION,
    VOCABULARY,
    deep_folder,
    schedule_of,
    sparse_row,
)
from trainer_node.learning.distillation.decoding_plan import ScheduleOf, decoding_plan
from trainer_node.learning.distillation.sparse_forward import PLAN, sparse_attention
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, micro_batches
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow

PACKINGS: list[Packing] = ["packed", "padded"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearnerModel:
    return LearnerModel(deep_folder(tmp_path_factory.mktemp("deep") / "model"), ALONE)


def together(rows: Sequence[TrainingRow], packing: Packing = "packed") -> MicroBatch:
    (found,) = micro_batches([list(enumerate(rows))], 0, 1 << 12, packing)
    return found


def scored(model: LearnerModel, batch: MicroBatch, of: ScheduleOf = schedule_of, page: int = PAGE) -> torch.Tensor:
    with torch.no_grad(), sparse_attention(model.module):
        return model.scores(batch, to_attention={PLAN: decoding_plan(batch, of, page, ALONE.device)}).logprobs


def reference(model: LearnerModel, row: TrainingRow, kept: int | None = 4, page: int = PAGE) -> list[float]:
    tokens, first = row.token_ids.tolist(), int(np.flatnonzero(row.learnt)[0])
    return Reference(model.folder, page, kept).logprobs(tokens[:first], tokens[first:])


@pytest.mark.parametrize("packing", PACKINGS)
def test_logprobs_equal_a_reference_that_decodes_token_by_token(model: LearnerModel, packing: Packing) -> None:
    rows = [sparse_row(1, 30, 41), sparse_row(2, 3, 60), sparse_row(3, 20, 5), sparse_row(4, 5, 4)]
    batch = together(rows, packing)
    expected = torch.tensor([value for row in rows for value in reference(model, row)])
    found = scored(model, batch)
    assert torch.allclose(found, expected, atol=2e-5)
    with torch.no_grad():
        dense = model.logprobs(batch)
    assert (found - dense).abs().max() > 0.05


def test_engines_with_larger_pages_keep_as_many_as_hold_the_budget(model: LearnerModel) -> None:
    row = sparse_row(1, 30, 61)
    wide = BudgetSchedule((5,), PAGE, 1000)  # 32 tokens: 4 pages of 8
    found = scored(model, together([row]), lambda version: wide, 8)
    assert torch.allclose(found, torch.tensor(reference(model, row, 4, 8)), atol=2e-5)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_budget_that_covers_the_text_is_dense(model: LearnerModel, packing: Packing) -> None:
    batch = together([sparse_row(1, 30, 41), sparse_row(2, 3, 20)], packing)
    with torch.no_grad():
        dense = model.logprobs(batch)
    full = BudgetSchedule((DENSE,), PAGE, 1000)
    for of in (lambda version: full, lambda version: None):
        assert torch.equal(scored(model, batch, of), dense)
    with torch.no_grad():
        assert torch.equal(model.logprobs(batch), dense)  # nothing remains behind


def test_prompts_dense_tokens_and_turns_ends_are_in_no_plan() -> None:
    row = sparse_row(1, 10, 30)
    versions, sparse = row.versions.copy(), row.sparse.copy()
    versions[20:24] = NOT_SAMPLED  # the environment's
    versions[32:] = VERSION + 1
    sparse[32:] = False
    plan = decoding_plan(
        together([replace(row, versions=versions, sparse=sparse & (versions >= 0))]),
        lambda version: BudgetSchedule((1,), 1, 1000),
        1,
        ALONE.device,
    )
    assert plan.places.tolist() == [*range(10, 19), *range(24, 31)]
    assert plan.kept.tolist() == [4] * len(plan.places)
    assert (plan.pages == plan.places + 1).all()


def test_bins_of_a_schedule_follow_the_position(model: LearnerModel) -> None:
    """Until position 39 the text is within its budget; from there on four pages remain."""
    row = sparse_row(1, 20, 60)
    rising = BudgetSchedule((1000, 1), PAGE, 40)
    found = scored(model, together([row]), lambda version: rising)
    with torch.no_grad():
        dense = model.logprobs(together([row]))
    assert torch.equal(found[:20], dense[:20])
    assert (found[21:] - dense[21:]).abs().max() > 0.05


def test_sliding_window_layers_stay_dense(model: LearnerModel) -> None:
    row = together([sparse_row(1, 20, 40)])
    layers = [layer.self_attn for layer in model.module.model.layers]
    try:
        for layer in layers:
            layer.sliding_window = 1000
        found = scored(model, row)
    finally:
        for layer in layers:
            layer.sliding_window = None
    with torch.no_grad():
        assert torch.allclose(found, model.logprobs(row), atol=1e-5)


def test_recomputed_activations_give_the_same_gradient(tmp_path: Path) -> None:
    batch, found = together([sparse_row(1, 30, 41), sparse_row(2, 3, 20)]), []
    for recompute in (False, True):
        folder = tmp_path / str(recompute)
        model = LearnerModel(deep_folder(folder), ALONE, recompute=recompute)
        with sparse_attention(model.module):
            plan = decoding_plan(batch, schedule_of, PAGE, ALONE.device)
            model.scores(batch, to_attention={PLAN: plan}).logprobs.sum().backward()
        found.append({name: p.grad for name, p in model.parameters.items()})
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-4), name


def test_a_pass_without_a_plan_is_refused(model: LearnerModel) -> None:
    with pytest.raises(UsageError, match="Qwen3Attention hand no keywords"), sparse_attention(model.module):
        model.logprobs(together([sparse_row(1, 3, 4)]))
    assert model.vocabulary == VOCABULARY
    assert model.module.config._attn_implementation == "sdpa"


def test_cached_keys_give_the_log_probabilities_of_whole_texts(model: LearnerModel) -> None:
    rows = [sparse_row(seed, 30, 1) for seed in (1, 2)]
    prompts = [row.token_ids[:30].tolist() for row in rows]
    said, logprobs = sparse_answers(model.module, prompts, 30, SCHEDULE, PAGE, torch.Generator().manual_seed(1))
    whole = [
        sparse_row(seed, 30, 30, token_ids=np.array([*prompt, *answer.tolist()]))
        for seed, (prompt, answer) in enumerate(zip(prompts, said, strict=True))
    ]
    expected = scored(model, together(whole))
    assert torch.allclose(logprobs.gather(2, said[..., None]).flatten(), expected, atol=2e-5)
