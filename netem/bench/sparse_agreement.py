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
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow
from trainer_node.learning.trainer_ranks import TrainerRanks


class Sampled(NamedTuple):
    """``token_ids`` of an answer, with the engine's log-probability of each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


def agreement(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    dense: Sequence[Sampled],
    sparse: Sequence[Sampled],
    schedule: BudgetSchedule,
    page_tokens: int,
) -> dict[str, Any]:
    """Mean differences of a token's log-probability without sign, in nats. ``dense_gap``, ``sparse_gap``: between
    engine and learner, with either attention. ``effect``: between the learner's sparse and dense attention.
    ``shortened``: of ``tokens``, those that attended to fewer pages than there were.
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
    return {**means, "shortened": shortened, "tokens": sum(len(one.token_ids) for one in sparse)}


def _batch(prompt: Sequence[int], sampled: Sampled) -> MicroBatch:
    ids = np.array([*prompt, *sampled.token_ids], np.int64)
    learnt = np.arange(len(ids)) >= len(prompt)
    said = np.zeros(len(ids), np.float32)
    said[learnt] = sampled.logprobs
    versions = np.where(learnt, 0, NOT_SAMPLED)
    row = TrainingRow(ids, learnt, said, np.zeros_like(said), 1.0, versions, 0, 0.0, truncated=False, sparse=learnt)
    (batch,) = micro_batches([[(0, row)]], 0, row.tokens, "packed")
    return batch
