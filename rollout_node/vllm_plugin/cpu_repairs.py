"""Fixes for vLLM's CPU build. The modules that are fixed import numba, so import this after the model is loaded."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import numpy as np
import torch

_INSTALLED: Final = "_p2pcast"
_FAULT: Final = "get_offset"


def repair_lora(wrapper: Any) -> None:
    """Fix LoRA in a server with ``--enable-lora``. ``wrapper``: vLLM's ``PunicaWrapperCPU`` class. Guarantees:

    - The base model's answers keep every bit next to an adapter's requests. vLLM marks the base model's tokens by the
      slot -1, but its CPU build then uses the last slot, and so the adapter in it.
    - Scoring a prompt next to other requests does not crash the engine. vLLM adds adapters to logits using a list with
      one entry per request, but the logits of a scored prompt have a row per token. Only the head scores prompts. That
      is exact, because p2pcast refuses adapters of the head. An adapter with values for the head is computed as before.
    """
    to_layer, to_logits = wrapper.add_lora_linear, wrapper.add_lora_logits
    if hasattr(to_layer, _INSTALLED):
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

    setattr(add_lora_linear, _INSTALLED, True)
    wrapper.add_lora_linear, wrapper.add_lora_logits = add_lora_linear, add_lora_logits


def keep_generators(runner: Any) -> None:
    """Keep seeded requests alive whose prompts are computed in chunks. ``runner``: vLLM's ``CPUModelRunner`` class,
    which is left unchanged if it does not have the bug.

    vLLM samples a token after each chunk of a prompt, drops it, and rewinds the request's generator by an offset. Only
    CUDA generators have offsets: on a CPU, the engine crashes with "CPU Generator does not use offset". Guarantee: a
    request draws from its generator only when its token counts, so its answer does not depend on the chunks.
    """
    inner = runner.sample_tokens
    if not is_faulty(runner) or hasattr(inner, _INSTALLED):
        return

    @wraps(inner)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        # Without its generator, a row draws from the common one, as rows without a seed do.
        kept = {int(row): batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return inner(self, grammar_output)
        finally:
            batch.generators.update(kept)

    setattr(sample_tokens, _INSTALLED, True)
    runner.sample_tokens = sample_tokens


def is_faulty(runner: Any) -> bool:
    """Whether this class still rewinds generators by an offset."""
    return _FAULT in runner._bookkeeping_sync.__code__.co_names
