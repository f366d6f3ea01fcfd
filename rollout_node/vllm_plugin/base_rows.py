"""Keeps LoRA adapters out of the base model's answers on vLLM's CPU build.

vLLM marks tokens of requests without an adapter by the slot -1, and its CPU build takes the last slot for them. If that
slot has an adapter, and a request of an adapter is in the same batch, the base's tokens get the adapter too. Promise:
after ``keep_base_rows``, a linear layer's output for tokens without an adapter keeps every bit.

The modules of LoRA load numba, so this comes after a model is loaded.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch

_INSTALLED: Final = "_p2pcast"


def keep_base_rows(wrapper: Any) -> None:
    """``wrapper``: vLLM's ``PunicaWrapperCPU`` class."""
    inner = wrapper.add_lora_linear
    if hasattr(inner, _INSTALLED):
        return

    @wraps(inner)
    def add_lora_linear(self: Any, y: torch.Tensor, *others: Any, **named: Any) -> None:
        bare = self.token_lora_indices < 0
        rows = y.view(-1, y.shape[-1])
        before = rows[bare]
        inner(self, y, *others, **named)
        rows[bare] = before

    setattr(add_lora_linear, _INSTALLED, True)
    wrapper.add_lora_linear = add_lora_linear
