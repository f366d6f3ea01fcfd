"""Finds models whose engine computes from values derived from the weights instead of the weights, and reloads them.

Guarantee: anything unknown counts as derived. A model with any such part is not edited in place, but reloaded as a
whole through vLLM's own startup path.
"""

from __future__ import annotations

from typing import Any

import torch

from p2pcast.ground.errors import IntegrityError
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.vllm_plugin.cpu_weights import keeps_experts
from rollout_node.vllm_plugin.quantised_layers import kept_as_loaded, plain_cache

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_PLAIN_ATTENTION = frozenset({"Attention", "MMEncoderAttention"})
"""Attention classes, including their subclasses, whose processing after loading only concerns scales."""
_CACHES = "KVCacheMethod"
_PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Backends for unquantised experts that keep the checkpoint's layout."""


def derived_parts(model: torch.nn.Module) -> list[str]:
    """List the parts whose runtime form differs from the loaded weight, each as a string "module: reason"."""
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


def reload_all(shadow: ShadowReader, model: Any, model_config: Any) -> None:
    """Load all tensors layer by layer, as at startup, into the existing storage, and derive values from them again.

    Derived values are, for example, quantised weights, MLA's matrices and reordered experts. Raises IntegrityError if a
    parameter has no tensor in the shadow; that parameter keeps its value.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        torch.inference_mode(),
        set_default_torch_dtype(model_config.dtype),
    ):  # as at the start: the dtype selects kernels
        initialize_layerwise_reload(model)
        try:
            model.load_weights(shadow.all())
        finally:  # without it, the parameters would be left without data
            unloaded = _unloaded_parameters(model)
            finalize_layerwise_reload(model, model_config)
    live = dict(model.named_parameters(remove_duplicate=False))
    loaded = {p.data_ptr() for name, p in live.items() if name not in unloaded}
    lost = [
        name for name in unloaded if name in live and live[name].data_ptr() not in loaded
    ]  # a tied parameter is loaded through its twin
    if lost:
        raise IntegrityError(
            f"no tensor of the run's layout reaches {lost[0]}; check that the engine serves the trained model"
        )


def _unloaded_parameters(model: Any) -> list[str]:
    """Parameters without a loaded tensor. Layers already completed are finalised and not listed."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        info = get_layerwise_info(module)
        if info.can_load():
            loaded_names = {parameter for parameter, _ in info.loaded_weights}
            missing = (p for p, t in info.restore_metadata[0].items() if t.numel() > 1 and p not in loaded_names)
            found += [f"{name}.{parameter}" if name else parameter for parameter in missing]
    return found
