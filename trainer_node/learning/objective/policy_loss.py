"""The policy's loss over sampled tokens. Pure torch: no I/O, clock or randomness.

A token has four log-probabilities: lp is the learner's, s the sampler's, o that of the weights at the start of the
step, r the reference model's. A is the advantage. g(x) = min(x * A, clip(x, 1 - clip_low, 1 + clip_high) * A) is PPO's
objective (arXiv 1707.06347, eq. 7), with the wider upper bound of DAPO (arXiv 2503.14476, section 3.1).

    clip   J = g(min(exp(lp - s), ratio_cap)) - beta * k3                one ratio, from sampler to learner; a capped
                                                                       ratio has no gradient (as INTELLECT-2 does)
    tis    J = w * (g(exp(lp - o)) - beta * k3)                         ECHO-2, eq. 24 and 25
           w = min(exp(o - s), tis_cap), without gradient               staleness and numerics
    k3     exp(r - lp) - (r - lp) - 1                                   GRPO (arXiv 2402.03300), eq. 4

Logarithms of ratios are held within +-log_ratio_limit. k3 estimates KL(learner || reference) under the learner's
samples; backpropagated, its expected gradient is that of KL(reference || learner).

Guarantees: loss = -sum(weight * J). A token of weight 0 is inert: whatever stands at its place, infinities and NaN
included, loss, gradients and statistics keep every bit, and its own gradient is 0. Weights have the denominator of the
whole update, so losses of micro-batches and ranks add up; where gradients are averaged over ranks, multiply the loss by
their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from p2pcast.ground.errors import UsageError
from trainer_node.learning.objective.token_statistics import TokenStatistics
from trainer_node.learning.objective.training_rows import TrainingRow

LossKind = Literal["clip", "tis"]
Length = Literal["token", "sequence"]
"""``token``: the mean over all learnt tokens. ``sequence``: the mean over rows of the mean over a row's learnt tokens
(PULSE, eq. 22).
"""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Symbols as of the module. ``kl_weight``: beta. Raises UsageError for a value out of range."""

    kind: LossKind = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float = 4.0
    log_ratio_limit: float = 20.0
    tis_cap: float = 2.0
    kl_weight: float = 0.0
    length: Length = "token"

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossKind) or self.length not in get_args(Length):
            raise UsageError(f"no loss has the kind {self.kind!r} and the length {self.length!r}")
        in_range = {
            "clip_low": 0 <= self.clip_low <= 1,
            "clip_high": 0 <= self.clip_high < math.inf,
            "ratio_cap": 1 <= self.ratio_cap < math.inf,
            # exp(88.7) overflows float32.
            "log_ratio_limit": 0 < self.log_ratio_limit <= 80,
            "tis_cap": 0 < self.tis_cap < math.inf,
            "kl_weight": 0 <= self.kl_weight < math.inf,
        }
        for name, fits in in_range.items():
            if not fits:
                raise UsageError(f"{name} = {getattr(self, name)} is out of range for the loss")


def token_weights(rows: Sequence[TrainingRow], length: Length) -> torch.Tensor:
    """The weight of each learnt token, by row: (R,) float64. ``rows``: all of one update, on all ranks together. 0 for
    rows without a learnt token, which do not count in the mean over rows either.
    """
    counts = torch.tensor([row.learnt_tokens for row in rows], dtype=torch.float64)
    denominators = counts.sum().expand_as(counts) if length == "token" else counts * (counts > 0).sum()
    return torch.where(counts > 0, 1.0 / denominators, 0.0)


def policy_loss(
    options: LossOptions,
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    old_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    same_version: torch.Tensor | None = None,
    sparse: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenStatistics]:
    """The loss of a micro-batch, a scalar with a gradient to ``logprobs`` alone, and the statistics of its tokens.

    All tensors are (M,). ``logprobs``: of the learner, from ``token_scores``. ``weights``: from ``token_weights``, 0
    where not learnt. ``old_logprobs``: needed by ``tis``. ``reference_logprobs``: needed by a ``kl_weight`` above 0.
    ``same_version`` bool: tokens of rollouts that the learner's present version alone has made. ``sparse`` bool: tokens
    that sparse attention sampled, for the statistics. ``entropies``: of the learner, from ``token_scores``, for the
    statistics.

    Raises UsageError for tensors of unlike shapes, or a tensor that is needed and missing.
    """
    if options.kind == "tis" and old_logprobs is None:
        raise UsageError("the loss tis needs log-probabilities of the weights at the start of the step")
    if options.kl_weight > 0 and reference_logprobs is None:
        raise UsageError("a loss with kl_weight needs log-probabilities of a reference model")
    given = (sampler_logprobs, advantages, weights, old_logprobs, reference_logprobs, same_version, sparse, entropies)
    if wrong := [tuple(t.shape) for t in given if t is not None and t.shape != logprobs.shape]:
        raise UsageError(f"{logprobs.numel()} log-probabilities and a tensor of shape {wrong[0]}")
    learnt = weights != 0

    def held(values: torch.Tensor) -> torch.Tensor:
        # A product with 0 would keep NaN and infinities, and 0 * inf in a gradient is NaN.
        return torch.where(learnt, values.to(logprobs.dtype), 0.0)

    learner = held(logprobs)
    sampler, advantage, weight = (held(t.detach()) for t in (sampler_logprobs, advantages, weights))
    start = learner.detach() if old_logprobs is None or options.kind == "clip" else held(old_logprobs.detach())
    log_importance = _limited(start - sampler, options)
    importance = log_importance.exp()
    cap = options.ratio_cap if options.kind == "clip" else options.tis_cap
    capped = importance.clamp(max=cap)
    if options.kind == "clip":
        ratio = _limited(learner - sampler, options).exp().clamp(max=cap)
        factor = torch.ones_like(capped)
    else:
        ratio = _limited(learner - start, options).exp()
        factor = capped
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantage
    objective = torch.minimum(unclipped, clipped)
    reference_k3 = None
    if reference_logprobs is not None:
        # Only the upper limit: a token far below the reference would overflow, one far above has a finite gradient.
        log_reference = (held(reference_logprobs.detach()) - learner).clamp(max=options.log_ratio_limit)
        reference_k3 = _k3(log_reference)
        if options.kl_weight > 0:
            objective = objective - options.kl_weight * reference_k3
    loss = -(weight * factor * objective).sum()
    with torch.no_grad():
        statistics = _statistics(
            learnt,
            log_importance,
            importance,
            capped,
            cap,
            clipped < unclipped,
            same_version,
            sparse,
            reference_k3,
            entropies,
        )
    return loss, statistics


def _limited(log_ratio: torch.Tensor, options: LossOptions) -> torch.Tensor:
    return log_ratio.clamp(-options.log_ratio_limit, options.log_ratio_limit)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # exp(x) - x - 1 would leave only rounding errors of a small x, such as that of equal weights in two programs.
    return torch.expm1(log_ratio) - log_ratio


def _statistics(
    learnt: torch.Tensor,
    log_importance: torch.Tensor,
    importance: torch.Tensor,
    capped: torch.Tensor,
    cap: float,
    clipped: torch.Tensor,
    same_version: torch.Tensor | None,
    sparse: torch.Tensor | None,
    reference_k3: torch.Tensor | None,
    entropies: torch.Tensor | None,
) -> TokenStatistics:
    """Sums over learnt tokens, in float64; one transfer from the device."""
    if not learnt.numel():
        return TokenStatistics()
    none = torch.zeros_like(learnt)
    same = none if same_version is None else same_version & learnt
    of_sparse = none if sparse is None else sparse & learnt
    with_reference = none if reference_k3 is None else learnt
    with_entropy = none if entropies is None else learnt
    k3 = _k3(log_importance.double())

    def total(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.where(where, values.double(), 0.0).sum()

    one = torch.ones_like(importance)
    sums = {
        "tokens": total(one, learnt),
        "ratio": total(importance, learnt),
        "over_cap": total(importance > cap, learnt),
        "clipped": total(clipped, learnt),
        "weight": total(capped, learnt),
        "weight_squared": total(capped.double() ** 2, learnt),
        "k1": total(-log_importance, learnt),
        "k3": total(k3, learnt),
        "same_version_tokens": total(one, same),
        "same_version_k3": total(k3, same),
        "reference_tokens": total(one, with_reference),
        "reference_k3": total(one if reference_k3 is None else reference_k3, with_reference),
        "entropy_tokens": total(one, with_entropy),
        "entropy": total(one if entropies is None else entropies, with_entropy),
        "sparse_tokens": total(one, of_sparse),
        "sparse_weight": total(capped, of_sparse),
        "sparse_k3": total(k3, of_sparse),
        "ratio_max": torch.where(learnt, importance.double(), 0.0).max(),
    }
    return TokenStatistics(**dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)))
