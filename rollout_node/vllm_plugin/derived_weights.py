"""Finds models whose engine computes from values derived from the weights, rather than from the weights themselves.

Promise: unknown counts as derived. A model with any such part isn't edited in place; it is reloaded as a whole.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout_node.vllm_plugin.cpu_weights import keeps_experts
from rollout_node.vllm_plugin.quantised_layers import kept_as_loaded, plain_cache

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_PLAIN_ATTENTION = frozenset({"Attention", "MMEncoderAttention"})
"""Attention classes whose processing after loading only concerns scales; subclasses included."""
_CACHES = "KVCacheMethod"
_PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Backends for unquantised experts that keep the checkpoint's arrangement."""


def derived_parts(model: torch.nn.Module) -> list[str]:
    """``module: reason`` for each part whose runtime form isn't the loaded weight."""
    found = []
    for name, module in model.named_modules():
        reason = _derivation(module)
        if reason:
            found.append(f"{name or 'model'}: {reason}")
    return found


def _derivation(module: Any) -> str | None:
    method = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if any(kin.__name__ == "QuantizeMethodBase" for kin in type(module).__mro__):
        return None  # some methods are modules too; their owning layer is checked below
    if kind == "UnquantizedFusedMoEMethod":
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
        return None if backend in _PLAIN_EXPERTS or keeps_experts(module) else f"experts arranged for {backend}"
    if hasattr(module, "_cpu_unpacked_conv_weight"):
        return "a convolution packed for the CPU"
    cache = kind.endswith(_CACHES) and plain_cache(module)
    if method is not None and kind not in _PLAIN_METHODS and not cache and not kept_as_loaded(module):
        return f"weights processed by {kind}"
    if callable(getattr(module, "process_weights_after_loading", None)):
        if not any(kin.__name__ in _PLAIN_ATTENTION for kin in type(module).__mro__):
            return f"{type(module).__name__} derives matrices after loading"
        if getattr(getattr(module, "impl", None), "sinks", None) is not None:
            return "attention sinks are kept in another form"
    return None
