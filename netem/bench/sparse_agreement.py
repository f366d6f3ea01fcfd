"""Tokens of a sparse vLLM engine beside the learner's own sparse forward pass, on the machine that has the engine.

The learner computes in float32 on the CPU, with weights and pages of the engine. The gap between both is rounding, as
it is between a dense engine and a dense learner. It is far smaller than the effect of the missing pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from p2pcast.sparse.budget_schedule import BudgetSchedule
from trainer_node.learning.distillation.decoding_plan import decoding_plan
from trainer_node.learning.distillation.sparse_forward import PLAN, sparse_attention
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trainer_ranks import TrainerRanks


class ScoredAnswer(NamedTuple):
    """``token_ids`` of an answer, with the engine's log-probability of each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


def agreement(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    dense: Sequence[ScoredAnswer],
    sparse: Sequence[ScoredAnswer],
    schedule: BudgetSchedule,
    page_tokens: int,
) -> dict[str, Any]:
    """Mean differences of a token's log-probability without sign, in nats. ``dense_gap``, ``sparse_gap``: between
    engine and learner, with either attention. ``effect``: between the learner's sparse and dense attention.
    ``shortened``: of ``tokens``, those that attended to fewer pages than there were. ``agrees``: whether the sparse gap
    is rounding: at most twice the dense one, or half of the effect.
    """
    model = LearnerModel(folder, TrainerRanks(0, 1, torch.device("cpu")), compute="float32")
    gaps: dict[str, list[torch.Tensor]] = {"dense_gap": [], "sparse_gap": [], "effect": []}
    shortened = 0
    with torch.no_grad():
        for prompt, sampled in zip(prompts, dense, strict=True):
            batch = _batch(prompt, sampled)
            gaps["dense_gap"].append(model.logprobs(batch) - batch.sampler_logprobs)
        for prompt, sampled in zip(prompts, sparse, strict=True):
            batch = _batch(prompt, sampled)
            plan = decoding_plan(batch, lambda version: schedule, page_tokens, model.device)
            with sparse_attention(model.module):
                ours = model.scores(batch, to_attention={PLAN: plan}).logprobs
            shortened += plan.places.numel()
            gaps["sparse_gap"].append(ours - batch.sampler_logprobs)
            gaps["effect"].append(ours - model.logprobs(batch))
    means = {name: float(torch.cat(found).abs().mean()) for name, found in gaps.items()}
    agrees = means["sparse_gap"] <= max(2 * means["dense_gap"], means["effect"] / 2)
    return {**means, "agrees": agrees, "shortened": shortened, "tokens": sum(len(one.token_ids) for one in sparse)}


def _batch(prompt: Sequence[int], sampled: ScoredAnswer) -> MicroBatch:
    row = TrainingRow.of_answer(prompt, sampled.token_ids, np.array(sampled.logprobs, np.float32))
    (batch,) = micro_batches([[(0, row)]], 0, row.tokens, "packed")
    return batch
