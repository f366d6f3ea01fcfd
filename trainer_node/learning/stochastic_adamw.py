"""AdamW on bfloat16 weights without masters: each update is computed in fp32 and rounded stochastically.

An update of less than half a unit in the last place would be lost by rounding to nearest. Rounding up with the
probability of the remainder keeps its expectation, at 10 bytes a weight instead of 14 (bf16 weight, fp32 moments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

LOST_BITS = 16
"""Bits of an fp32 word that bf16 has not."""


class StochasticAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """Decoupled weight decay as in torch's AdamW. Random bits come from torch's generator of the CPU, so equal seeds
    give equal weights.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        first, second = group["betas"]
        count = float(state["step"])
        word, gradient = _local(parameter), _local(parameter.grad).to(torch.float32)
        mean = _local(state["exp_avg"]).lerp_(gradient, 1 - first)
        square = _local(state["exp_avg_sq"]).mul_(second).addcmul_(gradient, gradient, value=1 - second)
        wide = word.to(torch.float32).mul_(1 - group["lr"] * group["weight_decay"])
        spread = (square.sqrt() / math.sqrt(1 - second**count)).add_(group["eps"])
        wide.addcdiv_(mean, spread, value=-group["lr"] / (1 - first**count))
        word.copy_(rounded_stochastically(wide))


def rounded_stochastically(wide: torch.Tensor) -> torch.Tensor:
    """fp32 → bf16, to one of both neighbours, with the probability of the remainder; values that bf16 has, and values
    that are not finite, stay.
    """
    bits = torch.randint(0, 1 << LOST_BITS, wide.shape, dtype=torch.int32, device="cpu").to(wide.device)
    words = wide.contiguous().view(torch.int32)
    kept = ((words + bits) & -(1 << LOST_BITS)).view(torch.float32)
    return torch.where(wide.isfinite(), kept, wide).to(torch.bfloat16)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
