"""phi: a LoRA adapter (arXiv 2106.09685) of the learner's model that only rollouts use.

    y = W x + alpha / rank * B (A x)          A (rank, columns) random, B (rows, rank) 0 at first: phi changes nothing

of each linear layer but the head. Guarantees: outside of ``applied`` the model has no trace of phi, and computes bit
for bit as without one. The words that are published are those that the learner computes with, as of all its weights.
Names and configuration are those of PEFT's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from p2pcast.checkpoint.adapter_form import PEFT_MODEL, state_name
from p2pcast.ground.errors import UsageError
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights

NAME: Final = "phi"
"""Of the adapter, in versions and at engines."""
_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"


class RolloutAdapter:
    """``rank``, ``alpha``: LoRA's. ``seed``: of A. Raises UsageError for a model that is sharded over ranks."""

    def __init__(
        self, model: LearnerModel, *, rank: int, alpha: float, options: OptimizerOptions, seed: int = 0
    ) -> None:
        if model.sharded:
            raise UsageError("[distill] rank above 0 trains on one rank alone: set rank = 0, or start one process")
        self._scaling, self._rank, self._alpha = alpha / rank, rank, alpha
        self._linears = _linear_layers(model.module)
        draw = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        published: dict[str, torch.dtype] = {}
        for name, linear in self._linears.items():
            weight = linear.weight
            words = model.published.get(f"{name}.weight", weight.dtype)
            bound = 1 / math.sqrt(linear.in_features)  # as PEFT and torch.nn.Linear draw
            a = torch.empty((rank, linear.in_features)).uniform_(-bound, bound, generator=draw).to(words)
            b = torch.zeros((linear.out_features, rank), dtype=words)
            for end, matrix in ((_A, a), (_B, b)):
                self.parameters[name + end] = torch.nn.Parameter(matrix.to(weight.device, weight.dtype))
                published[name + end] = words
        self._published = published
        self.weights = TrainedWeights(self.parameters, published, options)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the published words."""
        return next(iter(self._published.values()))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: forward passes inside use the model with phi."""
        with ExitStack() as stack:
            for name, linear in self._linears.items():
                hook = self._adding(self.parameters[name + _A], self.parameters[name + _B])
                stack.callback(linear.register_forward_hook(hook).remove)
            yield

    def _adding(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        linear, scaling = torch.nn.functional.linear, self._scaling

        def hook(module: Any, given: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
            return answer + scaling * linear(linear(given[0], a), b)

        return hook

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The published words under the names of PEFT's file, behind the adapter's name."""
        for name, parameter in self.parameters.items():
            yield state_name(NAME, PEFT_MODEL + name), parameter.detach().to(self._published[name])

    def configuration(self, base: str) -> Mapping[str, Any]:
        """As in PEFT's ``adapter_config.json``. ``base``: of the model."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self._rank,
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rpartition(".")[2] for name in self._linears}),
            "bias": "none",
        }


def _linear_layers(module: Any) -> dict[str, torch.nn.Linear]:
    """By name: all linear layers but the head, which vLLM's adapters leave out."""
    head = module.get_output_embeddings()
    found = {n: part for n, part in module.named_modules() if type(part) is torch.nn.Linear and part is not head}
    if not found:
        raise UsageError("[distill] rank above 0: the model has no linear layers for an adapter; set rank = 0")
    return found
