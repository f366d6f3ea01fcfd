"""Router replay: the layers of a mixture of experts are forced to the experts that the sampler's engine chose.

Sampler and learner round differently, so near ties of the router give other experts, and other log-probabilities. Under
replay a layer's experts are the recorded ones, and their gates are computed from the learner's own logits as the model
computes gates: so gradients flow through the gates. Tokens without recorded experts keep the learner's own choice.

The recorded experts of a micro-batch stay in force until the next micro-batch begins. So a backward pass that computes
activations again routes as the forward pass did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.rollouts.routed_experts import ExpertShape
from trainer_node.learning.objective.micro_batches import MicroBatch

Routing = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""From hidden states (N, H) to logits (N, experts), gates (N, top_k) and chosen experts (N, top_k)."""

LEAST_SUM: Final = 2.0**-64
"""Least divisor of gates. No router chooses experts whose probabilities have a smaller sum, but a worker may state any
experts. A sum of 0 gives NaN, and a very small one an infinite gradient.
"""


class Gates(Protocol):
    def __call__(self, router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Gates (N, top_k) of the chosen experts."""


class Family(NamedTuple):
    """``router``: name of the class in transformers, whose module is ``mlp.gate`` of a decoder layer."""

    router: str
    gates: Gates


def softmax_gates(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts in float32; divided by the sum of the chosen ones if the model does so. Finite, with
    finite gradients, for any chosen experts.
    """
    gates = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
    if router.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True).clamp_min(LEAST_SUM)
    return gates.to(logits.dtype)


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2_moe": Family("Qwen2MoeTopKRouter", softmax_gates),
    "qwen3_moe": Family("Qwen3MoeTopKRouter", softmax_gates),
}
"""By ``model_type`` of the configuration."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """``places`` (P,) int64: of ``positions`` flattened positions. ``ids`` (P, layers, top_k), of any integer type."""

    positions: int
    places: torch.Tensor
    ids: torch.Tensor


class RouterReplay:
    """``shape``: of the experts that can be replayed."""

    def __init__(self, module: Any) -> None:
        """Replaces the routing of a causal LM's layers. Raises UsageError for a model whose routers are unknown."""
        config = module.config
        family = FAMILIES.get(config.model_type)
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise UsageError(
                f"[train] router-replay = 'on' does not fit a model of the type {config.model_type}: routers are known"
                f" of {known}. Set router-replay = 'off'"
            )
        self._gates = family.gates
        self.shape = ExpertShape(config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)
        self._recorded: _Recorded | None = None
        self.expert_layers: list[int] = []
        """Layers that have experts; others are dense."""
        for layer, part in enumerate(module.model.layers):
            router: Any = getattr(part.mlp, "gate", None)
            if type(router).__name__ == family.router:
                router.forward = self._routing(layer, router, router.forward)
                self.expert_layers.append(layer)
        if not self.expert_layers:
            raise UsageError(
                f"[train] router-replay = 'on': no layer of the model has a {family.router}; this release of"
                " transformers routes in another way. Set router-replay = 'off'"
            )

    def follow(self, batch: MicroBatch | None, device: torch.device) -> None:
        """Route the next passes as ``batch`` has recorded; None: by the learner's own choice."""
        self._recorded = None if batch is None else _recorded(batch, device)

    def _routing(self, layer: int, router: Any, own: Routing) -> Routing:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, gates, chosen = own(hidden)
            recorded = self._recorded
            if recorded is None:
                return logits, gates, chosen
            if len(chosen) != recorded.positions:
                raise LocalError(f"a layer routes {len(chosen)} positions of a micro-batch of {recorded.positions}")
            chosen = chosen.clone()
            chosen[recorded.places] = recorded.ids[:, layer].to(chosen.dtype)
            return logits, self._gates(router, logits, chosen), chosen

        return forward


def _recorded(batch: MicroBatch, device: torch.device) -> _Recorded | None:
    if not batch.routed:
        return None
    places = np.concatenate([start + routed.places() for start, routed in batch.routed])
    ids = np.concatenate([routed.array() for _, routed in batch.routed])
    if ids.itemsize > 1:
        ids = ids.astype(np.int32)  # torch computes little with uint16
    return _Recorded(batch.input_ids.numel(), torch.from_numpy(places).to(device), torch.from_numpy(ids).to(device))
