"""Repairs of LoRA on vLLM's CPU build, in a server with ``--enable-lora``.

Promises, after ``repair``:

- Answers of the base model keep every bit beside requests of an adapter. vLLM marks tokens of the base by the slot -1.
  Its CPU build takes the last slot for them, and so the adapter in it.
- A prompt that is scored beside other requests does not end the engine. vLLM adds adapters to logits by a list with one
  entry for each request, and the logits of a scored prompt have a row for each token. The head alone scores prompts.
  That is exact, since p2pcast refuses adapters of the head. Where an adapter has values for the head, vLLM computes as
  before.

The modules of LoRA load numba, so this comes after a model is loaded.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch

_REPAIRED: Final = "_p2pcast"


def repair(wrapper: Any) -> None:
    """``wrapper``: vLLM's ``PunicaWrapperCPU`` class."""
    to_layer, to_logits = wrapper.add_lora_linear, wrapper.add_lora_logits
    if hasattr(to_layer, _REPAIRED):
        return

    @wraps(to_layer)
    def add_lora_linear(self: Any, y: torch.Tensor, *others: Any, **named: Any) -> None:
        bare = self.token_lora_indices < 0
        rows = y.view(-1, y.shape[-1])
        before = rows[bare]
        to_layer(self, y, *others, **named)
        rows[bare] = before

    @wraps(to_logits)
    def add_lora_logits(
        self: Any, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, *others: Any, **named: Any
    ) -> None:
        of_requests = x.reshape(-1, x.shape[-1]).shape[0] == self.sampler_indices.shape[0]
        if of_requests or bool(lora_a_stacked.any()):
            to_logits(self, y, x, lora_a_stacked, *others, **named)

    setattr(add_lora_linear, _REPAIRED, True)
    wrapper.add_lora_linear, wrapper.add_lora_logits = add_lora_linear, add_lora_logits
