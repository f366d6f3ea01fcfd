"""The tail of acceptance rates before and after the adapter of rollouts was trained, at equal budgets and seeds.

Answers are sampled in this process, by sparse attention with the adapter; rates are those of whole distributions, and
of prompts that the adapter never saw. The first token of an answer is left out: its prompt's pass, which is dense,
gives it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from netem.rollouts.sparse_sampler import Answers, sparse_answers
from p2pcast.ground.errors import UsageError
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS, PERCENTILE
from p2pcast.sparse.budget_schedule import BudgetSchedule
from p2pcast.tasks.trial_tasks.recite import Recite
from rollout_node.sparse_calibration.prompt_file import prompts_of_file
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, DistillReport, SparseDistillation
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions
from trainer_node.learning.trainer_ranks import TrainerRanks

logger = logging.getLogger("p2pcast.bench")

SEED: Final = 4242
"""Of prompts of task recite: unlike those of the model's training."""
AT_ONCE: Final = 16
"""Prompts of one pass of the sampler."""
LOG_EVERY: Final = 10
MOST_TOKENS: Final = 4096
"""Of a micro-batch."""
KEYS: Final = ("percentile", "mean", "kl")
"""Of each row, before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """``prompts``: token ids, all of one length; the last ``held_out`` of them are measured, and the adapter is trained
    on the others. ``tokens``: of an answer. ``pages``: budget of the training, in pages of 16 tokens besides the
    reserved ones; it is measured, and so are ``budgets``. ``page_tokens``: of the cache. ``steps``: updates of the
    adapter. ``batch``: answers of each. ``rank``, ``alpha``, ``lr``: of the adapter.
    """

    model: Path
    prompts: Sequence[list[int]]
    held_out: int
    tokens: int
    pages: int
    budgets: Sequence[int]
    page_tokens: int
    steps: int
    batch: int
    rank: int
    alpha: float
    lr: float
    seed: int


def bench_distill(options: TailOptions) -> dict[str, Any]:
    """``rows`` by budget: pages, tokens, and ``percentile``, ``mean`` and ``kl`` (sparse from dense, in nats) before
    and after; the log of ``steps``. Raises UsageError for prompts that do not fit.
    """
    prompts = options.prompts
    if options.held_out * (options.tokens - 1) < LEAST_TOKENS or len(prompts) <= options.held_out:
        raise UsageError(f"a percentile needs {LEAST_TOKENS} tokens of held-out prompts, and others are trained on")
    trained, held = prompts[: -options.held_out], prompts[-options.held_out :]
    model = LearnerModel(options.model, TrainerRanks(0, 1, torch.device("cpu")), compute="float32")
    adapter = RolloutAdapter(
        model, rank=options.rank, alpha=options.alpha, options=OptimizerOptions(options.lr), seed=options.seed
    )
    schedule = BudgetSchedule((options.pages,))
    distillation = SparseDistillation(
        model,
        adapter,
        DistillOptions(
            LossOptions(), MOST_TOKENS, "padded", kl_weight=1.0, ppo_weight=0.0, page_tokens=options.page_tokens
        ),
        lambda version: schedule,
    )
    budgets = sorted({options.pages, *options.budgets})
    before = {pages: _rates(model, adapter, held, pages, options) for pages in budgets}
    steps = _train(distillation, model, trained, schedule, options)
    after = {pages: _rates(model, adapter, held, pages, options) for pages in budgets}
    rows = [
        {"pages": pages, "tokens": before[pages]["tokens"]}
        | {f"{key}_{name}": found[pages][key] for name, found in (("before", before), ("after", after)) for key in KEYS}
        for pages in budgets
    ]
    return {"parameters": sum(p.numel() for p in adapter.parameters.values()), "rows": rows, "steps": steps}


def _train(
    distillation: SparseDistillation,
    model: LearnerModel,
    prompts: Sequence[list[int]],
    schedule: BudgetSchedule,
    options: TailOptions,
) -> list[dict[str, Any]]:
    rng, log = random.Random(options.seed), []
    for step in range(options.steps):
        chosen = rng.sample(prompts, options.batch)
        with distillation.adapter.applied():
            answers = _answers(model, chosen, schedule, options, options.seed + step + 1)
        report: DistillReport = distillation.train(_rows(chosen, answers), step, lambda: None)
        log.append(report.document())
        if step % LOG_EVERY == 0 or step == options.steps - 1:
            logger.info("step %d: KL %.4f, mean acceptance %.4f", step + 1, report.kl, report.acceptance)
    return log


def _answers(
    model: LearnerModel, prompts: Sequence[list[int]], schedule: BudgetSchedule, options: TailOptions, seed: int
) -> Answers:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        sparse_answers(
            model.module, prompts[at : at + AT_ONCE], options.tokens, schedule, options.page_tokens, generator
        )
        for at in range(0, len(prompts), AT_ONCE)
    ]
    return Answers(*(torch.cat(one) for one in zip(*parts, strict=True)))


def _rates(
    model: LearnerModel, adapter: RolloutAdapter, prompts: Sequence[list[int]], pages: int, options: TailOptions
) -> dict[str, float]:
    """Of sparse attention with the adapter, against dense attention without."""
    with adapter.applied():
        answers = _answers(model, prompts, BudgetSchedule((pages,)), options, options.seed)
    ids = torch.cat([torch.tensor(prompts), answers.token_ids], 1)
    first = len(prompts[0])
    dense = []
    with torch.no_grad():
        for part in ids.split(AT_ONCE):
            logits = model.module(input_ids=part, use_cache=False).logits[:, first - 1 : -1]
            dense.append(logits.float().log_softmax(-1))
    p, q = torch.cat(dense)[:, 1:], answers.logprobs[:, 1:]
    alphas = torch.minimum(p.exp(), q.exp()).sum(-1).flatten().numpy()
    return {
        "tokens": alphas.size,
        "percentile": float(np.percentile(alphas, PERCENTILE)),
        "mean": float(alphas.mean()),
        "kl": float((q.exp() * (q - p)).sum(-1).mean()),
    }


def _rows(prompts: Sequence[list[int]], answers: Answers) -> list[TrainingRow]:
    logprobs = answers.logprobs.gather(2, answers.token_ids[..., None])[..., 0]
    said = zip(prompts, answers.token_ids.tolist(), logprobs.numpy(), strict=True)
    return [TrainingRow.of_answer(*one) for one in said]


def token_ids_of_file(file: Path) -> list[list[int]]:
    """Of JSON lines with ``token_ids``. Raises UsageError."""
    prompts = prompts_of_file(file)
    found = [one for one in prompts if not isinstance(one, str)]
    if len(found) < len(prompts) or len({len(one) for one in found}) > 1:
        raise UsageError(f"{file}: each line has token_ids, and all prompts have one length")
    return found


def prompts_of_recite(tokens: int, phrases: int, count: int) -> list[list[int]]:
    """Raises UsageError for a length that the task refuses."""
    task = Recite(tokens, phrases=phrases)
    return [task.drawn(job.prompt).prompt.tolist() for job in islice(task.jobs(SEED), count)]
