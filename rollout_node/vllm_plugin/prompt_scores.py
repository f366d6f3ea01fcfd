"""Keeps vLLM's CPU build alive when a prompt is scored in a server with LoRA adapters.

With ``--enable-lora`` vLLM adds each request's adapter to the logits, by a list with one entry for each running one.
The logits of a scored prompt have a row for each token. With several requests the engine then ends with an error of
``einsum``. Promise: after ``keep_prompt_scores``, the head alone scores prompts. That is exact, since p2pcast
refuses adapters of the head. Where an adapter has values for the head, vLLM computes as before.

The modules of LoRA load numba, so this comes after a model is loaded.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch

_INSTALLED: Final = "_p2pcast"


def keep_prompt_scores(wrapper: Any) -> None:
    """``wrapper``: vLLM's ``PunicaWrapperCPU`` class."""
    inner = wrapper.add_lora_logits
    if hasattr(inner, _INSTALLED):
        return

    @wraps(inner)
    def add_lora_logits(
        self: Any, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: torch.Tensor, *others: Any, **named: Any
    ) -> None:
        of_requests = x.reshape(-1, x.shape[-1]).shape[0] == self.sampler_indices.shape[0]
        if of_requests or bool(lora_a_stacked.any()):
            inner(self, y, x, lora_a_stacked, *others, **named)

    setattr(add_lora_logits, _INSTALLED, True)
    wrapper.add_lora_logits = add_lora_logits
