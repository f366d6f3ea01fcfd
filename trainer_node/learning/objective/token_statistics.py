"""Statistics of learnt tokens, as sums: those of micro-batches and of ranks add up. No I/O, clock or randomness.

The ratio of a token is its probability by the learner over that by the sampler; both are at the sampler's temperature.
With l the logarithm of the ratio, k1 = -l and k3 = exp(l) - l - 1 estimate KL(sampler || learner) without bias
(J. Schulman, "Approximating KL divergence", 2020), since the sampler drew the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """``tokens``: learnt tokens. ``ratio``, ``ratio_max``: sum and maximum of ratios, before the cap. ``over_cap``:
    tokens with a ratio above the cap. ``clipped``: tokens whose objective is the clipped one, without a gradient.
    ``weight``, ``weight_squared``: sums of the ratio after the cap, and of its square. ``k1``, ``k3``: sums of the
    estimators. ``same_version_tokens``, ``same_version_k3``: tokens of rollouts that the learner's own version made
    alone, and their k3, which numerics cause. ``reference_tokens``, ``reference_k3``: tokens that a reference model has
    scored, and the sum of the estimator k3 of KL(learner || reference). ``entropy_tokens``, ``entropy``: tokens whose
    entropy is known, and the sum of the learner's entropies at their positions. ``sparse_tokens``, ``sparse_weight``,
    ``sparse_k3``: tokens that sparse attention sampled, and their part of ``weight`` and ``k3``.
    """

    tokens: float = 0.0
    ratio: float = 0.0
    over_cap: float = 0.0
    clipped: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    same_version_tokens: float = 0.0
    same_version_k3: float = 0.0
    reference_tokens: float = 0.0
    reference_k3: float = 0.0
    entropy_tokens: float = 0.0
    entropy: float = 0.0
    sparse_tokens: float = 0.0
    sparse_weight: float = 0.0
    sparse_k3: float = 0.0
    ratio_max: float = 0.0

    def sums(self) -> torch.Tensor:
        """All values but the maximum, a vector of float64 on the CPU, to be summed over ranks."""
        return torch.tensor([getattr(self, name) for name in _SUMS], dtype=torch.float64)

    @classmethod
    def of(cls, sums: torch.Tensor, ratio_max: float) -> TokenStatistics:
        """From ``sums()``, summed over ranks, and the largest ``ratio_max``."""
        return cls(**dict(zip(_SUMS, sums.tolist(), strict=True)), ratio_max=ratio_max)

    def add(self, other: TokenStatistics) -> TokenStatistics:
        """The statistics of both sets of tokens together."""
        return self.of(self.sums() + other.sums(), max(self.ratio_max, other.ratio_max))

    def document(self) -> dict[str, float | None]:
        """Keys of the event ``step`` in a run's metrics: means over learnt tokens, KL and entropy in nats a token,
        shares of 1; None where no token counts. ``weight_sparse``, ``weight_dense``: mean ratio after the cap, of
        tokens that sparse and dense attention sampled. ``effective_sample_share``: (sum w)^2 / sum w^2, Kish's
        effective sample size, as a share of the tokens.
        """
        return {
            "kl_sampler": _over(self.k3, self.tokens),
            "kl_sampler_k1": _over(self.k1, self.tokens),
            "kl_same_version": _over(self.same_version_k3, self.same_version_tokens),
            "sparse_share": _over(self.sparse_tokens, self.tokens),
            "kl_sparse": _over(self.sparse_k3, self.sparse_tokens),
            "weight_sparse": _over(self.sparse_weight, self.sparse_tokens),
            "weight_dense": _over(self.weight - self.sparse_weight, self.tokens - self.sparse_tokens),
            "kl_reference": _over(self.reference_k3, self.reference_tokens),
            "entropy": _over(self.entropy, self.entropy_tokens),
            "ratio_mean": _over(self.ratio, self.tokens),
            "ratio_max": self.ratio_max if self.tokens else None,
            "over_cap_share": _over(self.over_cap, self.tokens),
            "clip_share": _over(self.clipped, self.tokens),
            "effective_sample_share": _over(self.weight**2, self.weight_squared * self.tokens),
        }


_SUMS = tuple(field.name for field in fields(TokenStatistics) if field.name != "ratio_max")


def _over(value: float, count: float) -> float | None:
    return value / count if count else None
