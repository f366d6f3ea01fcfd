"""Warm start: supervised steps on a task's demonstrations, for a base model that no rollout rewards.

The loss is the mean cross-entropy of the tokens that a policy would sample (the demonstration's mask); prompts and what
the task says are read and not learnt. Steps use the learner's own micro-batches, masters and ranks, with an optimiser
of their own: its moments end with the warm start, and the masters are handed over unrounded.

Guarantee: equal weights, demonstrations and options give equal weights, bit for bit, on one machine and number of
ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, get_args

import numpy as np
import torch

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.tasks.task import Demonstration, Task, demonstrations_of
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, deal, micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import Masters, OptimizerOptions, TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks

logger = logging.getLogger("p2pcast.learner")

ALONE: Final = TrainerRanks(0, 1, torch.device("cpu"))
LOG_EVERY: Final = 50
"""Steps between two lines of the log."""
_WEIGHTS: Final = "weights."


@dataclass(frozen=True, slots=True)
class WarmStartOptions:
    """``batch``: demonstrations of a step. ``warmup_steps``: steps over which the rate rises. ``most_tokens``: of a
    micro-batch. ``seed``: of the demonstrations and of everything else random. Raises UsageError for a value out of
    range.
    """

    steps: int
    batch: int = 64
    lr: float = 1e-3
    warmup_steps: int = 20
    most_tokens: int = 8192
    packing: Packing = "packed"
    seed: int = 0

    def __post_init__(self) -> None:
        in_range = {
            "steps": self.steps >= 1,
            "batch": self.batch >= 1,
            "lr": 0 < self.lr < math.inf,
            "warmup_steps": self.warmup_steps >= 0,
            "most_tokens": self.most_tokens >= 1,
            "packing": self.packing in get_args(Packing),
        }
        for name, fits in in_range.items():
            if not fits:
                raise UsageError(f"{name} = {getattr(self, name)} is out of range for a warm start")

    def optimizer(self, masters: Masters = "fp32") -> OptimizerOptions:
        return OptimizerOptions(lr=self.lr, warmup_steps=self.warmup_steps, masters=masters)


def start(
    model: LearnerModel, weights: TrainedWeights, task: Task, config: LearnerConfig, ranks: TrainerRanks
) -> list[float]:
    """Train ``weights`` as table [sft] states. All ranks call. Returns the loss of each step. Raises UsageError."""
    options = WarmStartOptions(
        config.sft.steps,
        config.sft.batch,
        config.sft.lr,
        config.sft.warmup_steps,
        config.train.micro_batch_tokens,
        config.train.packing,
        config.train.seed,
    )
    demonstrations = demonstrations_of(task, options.seed)
    mine = TrainedWeights(model.parameters, model.published, options.optimizer(config.optimizer.masters))
    losses = warm_start(model.logprobs, mine, demonstrations, options, vocabulary=model.vocabulary, ranks=ranks)
    weights.restore({name: value for name, value in mine.state().items() if name.startswith(_WEIGHTS)})
    return losses


def warm_start(
    logprobs: Callable[[MicroBatch], torch.Tensor],
    weights: TrainedWeights,
    demonstrations: Iterator[Demonstration],
    options: WarmStartOptions,
    *,
    vocabulary: int,
    ranks: TrainerRanks = ALONE,
) -> list[float]:
    """Train ``weights``, made with ``options.optimizer()``. ``logprobs``: of a micro-batch's targets, (M,), with a
    gradient to the weights' parameters. All ranks call with equal demonstrations. Returns the loss of each step.

    Raises UsageError for demonstrations that are too few or no text of the model, LocalError for a gradient that is not
    finite.
    """
    torch.manual_seed(options.seed)
    losses: list[float] = []
    for step in range(options.steps):
        chosen = list(islice(demonstrations, options.batch))
        if len(chosen) < options.batch:
            raise UsageError(f"the task's demonstrations ended after {step} of {options.steps} steps of the warm start")
        rows = [_row(one, number, vocabulary) for number, one in enumerate(chosen)]
        losses.append(_gradient(logprobs, weights, rows, options, ranks))
        if not math.isfinite(weights.update(step)):
            raise LocalError(
                f"the gradient of warm start step {step} is not finite: lower the learning rate {options.lr}"
            )
        if (step + 1) % LOG_EVERY == 0:
            logger.info("warm start: step %d of %d, loss %.3f", step + 1, options.steps, losses[-1])
    return losses


def _row(one: Demonstration, number: int, vocabulary: int) -> TrainingRow:
    token_ids, learnt = np.asarray(one.token_ids).astype(np.int64), np.asarray(one.mask) == 1
    if token_ids.ndim != 1 or token_ids.shape != learnt.shape or not learnt[1:].any():
        raise UsageError(
            f"a demonstration of {token_ids.shape} tokens with a mask of {learnt.shape} holds no token to learn: each"
            " token needs its value of the mask, 1 on at least one after the first"
        )
    if not 0 <= token_ids.min() <= token_ids.max() < vocabulary:
        raise UsageError(
            f"a demonstration holds the token id {token_ids.max()}, and the model has {vocabulary}: take the task's"
            " own model or tokenizer"
        )
    # The first token of a row is predicted from no position.
    learnt[0] = False
    return TrainingRow.of_text(token_ids, learnt, number)


def _gradient(
    logprobs: Callable[[MicroBatch], torch.Tensor],
    weights: TrainedWeights,
    rows: Sequence[TrainingRow],
    options: WarmStartOptions,
    ranks: TrainerRanks,
) -> float:
    """Collects the gradient of one step. The loss, over all ranks."""
    mine = micro_batches(deal(rows, ranks.count), ranks.rank, options.most_tokens, options.packing)
    learnt = sum(row.learnt_tokens for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in mine:
        found = logprobs(batch)
        value = -torch.where(batch.learnt.to(found.device), found, 0.0).sum() / learnt
        # FSDP averages gradients over ranks, and the denominator counts the tokens of all ranks.
        (value * ranks.count if ranks.mesh is not None else value).backward()
        weights.collect_gradients()
        loss += value.detach().to("cpu", torch.float64)
    return float(ranks.total(loss[None])[0])
