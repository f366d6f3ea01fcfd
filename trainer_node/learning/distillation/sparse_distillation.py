"""DistillSparse: one update of the rollout adapter after each update of the policy (Sparrow, section 4.5).

    theta   frozen, as the policy's update has left it
    p       distributions of theta with dense attention and without phi, without a gradient
    q       distributions of theta and phi with the attention that sampled the token; s: the sampler's
    loss    mean of kl_weight * KL(p || q) - w * ppo_weight * g
    w       min(q / s, tis_cap) of the sampled token, without gradient: staleness, and numerics of the engine
    g       the policy's clipped objective (``policy_loss``), for the ratio of q to itself before the update
    KL      over the most probable tokens of p, and all others as one: a lower bound

Sparrow estimates the divergence by the sampled tokens (k3), whose gradient has the same mean under the sampler. It
weighs tokens by p / q, and the sampler hardly ever draws those that sparse attention misses. Here both distributions
are known, so their gradient has no such noise. ``kl`` of the report is the value of k3, which estimates
KL(sparse || dense), since sparse attention sampled the tokens.

Guarantees: theta, its gradients and its optimiser keep every bit. Equal rows and weights give equal phi. Nothing random
outlives an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from trainer_node.learning.distillation.decoding_plan import DecodingPlan, ScheduleOf, decoding_plan
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_forward import PLAN, sparse_attention
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, deal, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions, policy_loss, token_weights
from trainer_node.learning.objective.token_statistics import TokenStatistics
from trainer_node.learning.objective.training_rows import TrainingRow

LEAST_REST: Final = 1e-5
"""Least probability of all tokens that are no candidates: sums in float32 are not exact enough for smaller ones."""


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """``kl_weight``: lambda. ``ppo_weight``: of the policy's objective; 0: distillation alone. ``candidates``: most
    probable tokens of the divergence. ``page_tokens``: of the engines' pages. ``loss``: the policy's, for its bounds
    and the mean over tokens. ``most_tokens``: of a micro-batch.
    """

    loss: LossOptions
    most_tokens: int
    packing: Packing = "packed"
    kl_weight: float = 0.001
    ppo_weight: float = 1.0
    candidates: int = 64
    page_tokens: int = 16


@dataclass(frozen=True, slots=True)
class DistillReport:
    """``kl``: KL(sparse || dense) by k3, in nats a token. ``kl_sampler``: KL(sampler || learner's sparse attention
    with phi) by k3; numerics and staleness. ``acceptance``: mean acceptance rate, estimated by min(1, p(dense) /
    p(sparse)) of the sampled tokens. ``shortened``: decoded positions with fewer pages than there were. None: no
    tokens.
    """

    loss: float
    grad_norm: float
    kl: float | None
    kl_sampler: float | None
    acceptance: float | None
    shortened: int

    def document(self) -> dict[str, Any]:
        """Keys of the event ``step``."""
        return {
            "distill_loss": self.loss,
            "distill_grad_norm": self.grad_norm,
            "kl_distill": self.kl,
            "kl_distill_sampler": self.kl_sampler,
            "acceptance_distill": self.acceptance,
            "distill_shortened": self.shortened,
        }


class SparseDistillation:
    """``schedule_of``: see ``decoding_plan``."""

    def __init__(
        self, model: LearnerModel, adapter: RolloutAdapter, options: DistillOptions, schedule_of: ScheduleOf
    ) -> None:
        self._model, self.adapter, self._options = model, adapter, options
        self._schedule_of = schedule_of
        self._loss = replace(options.loss, kind="tis", kl_weight=0.0)

    def check(self) -> None:
        """Compute two tokens as in a rollout. Raises UsageError for a model whose attention cannot be replaced."""
        for batch in micro_batches([[]], 0, 1, self._options.packing):
            with torch.no_grad(), self.rolling_out(batch) as plan:
                self._model.scores(batch, to_attention={PLAN: plan})

    def train(self, rows: Sequence[TrainingRow], step: int, before_update: Callable[[], None]) -> DistillReport:
        """``step``: of the policy before its update; the learning rate is phi's at this step. ``before_update``:
        returns once phi may change.
        """
        by_row = token_weights(rows, self._options.loss.length)
        parts = micro_batches(deal(rows, 1), 0, self._options.most_tokens, self._options.packing)
        loss, accepted, shortened = 0.0, 0.0, 0
        statistics = TokenStatistics()
        for batch in parts:
            dense = self._model.most_probable(batch, self._options.candidates)
            with self.rolling_out(batch) as plan:
                scores = self._model.candidate_logprobs(batch, dense.ids, to_attention={PLAN: plan})
                sparse, weights = scores[:, 0], batch.weights(by_row).to(scores.device)
                value, counted = policy_loss(
                    self._loss,
                    sparse,
                    batch.sampler_logprobs.to(scores.device),
                    self._options.ppo_weight * batch.advantages.to(scores.device),
                    weights,
                    old_logprobs=sparse.detach(),
                    reference_logprobs=dense.logprobs[:, 0],
                )
                value = value + self._options.kl_weight * divergence(dense.logprobs[:, 1:], scores[:, 1:], weights)
                value.backward()
            self.adapter.weights.collect_gradients()
            loss += float(value.detach())
            accepted += _accepted(dense.logprobs[:, 0], sparse.detach(), batch.learnt.to(sparse.device))
            shortened += plan.places.numel()
            statistics = statistics.add(counted)
        before_update()
        norm = self.adapter.weights.update(step)
        found = statistics.document()
        mean = accepted / statistics.tokens if statistics.tokens else None
        return DistillReport(loss, norm, found["kl_reference"], found["kl_sampler"], mean, shortened)

    @contextmanager
    def rolling_out(self, batch: MicroBatch) -> Iterator[DecodingPlan]:
        """Passes inside, with the plan under the keyword PLAN, are those of rollouts: phi is applied, and theta is
        frozen.
        """
        plan = decoding_plan(batch, self._schedule_of, self._options.page_tokens, self._model.device)
        trained = [p for p in self._model.parameters.values() if p.requires_grad]
        with sparse_attention(self._model.module), self.adapter.applied():
            for parameter in trained:
                parameter.requires_grad_(False)
            try:
                yield plan
            finally:
                for parameter in trained:
                    parameter.requires_grad_(True)


def divergence(dense: torch.Tensor, sparse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of KL(dense || sparse), in nats, times ``weights`` (M,). ``dense``, ``sparse``: log-probabilities (M, K)
    of different tokens; the tokens beside them count as one, the least probable rests as equal.
    """
    # A product with 0 would keep the infinities of a token that cannot be sampled, and their gradient.
    possible = (dense > -math.inf) & (weights != 0).unsqueeze(-1)
    p, q = torch.where(possible, dense, 0.0), torch.where(possible, sparse, 0.0)
    among = torch.where(possible, p.exp() * (p - q), 0.0).sum(-1)
    rest_p, rest_q = ((1 - torch.where(possible, one.exp(), 0.0).sum(-1)).clamp(min=LEAST_REST) for one in (p, q))
    beside = rest_p * (rest_p.log() - rest_q.log())
    return (torch.where(weights != 0, among + beside, 0.0) * weights).sum()


def _accepted(dense: torch.Tensor, sparse: torch.Tensor, learnt: torch.Tensor) -> float:
    """The sum over sampled tokens of min(1, p / q), whose mean under q is the sum of min(p, q) over the vocabulary."""
    return float((dense - sparse)[learnt].double().exp().clamp(max=1.0).sum())
