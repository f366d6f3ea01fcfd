"""Quantised layers whose kernels compute from the codes and scales as loaded, perhaps transposed.

After loading, vLLM replaces such a layer's parameters by views that have no loader. Guarantee: within ``loading_form``,
the model's loader finds the parameters as they were before, in the live storage, so it can be recorded and can load. A
layer of any other kind, or whose parameters differ in size from those loaded, is not ``kept_as_loaded``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollout_node.vllm_plugin import cpu_weights

_METHOD = "CompressedTensorsLinearMethod"
_FP8, _INT8 = "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Int8"
_FP8_KERNELS = frozenset({"ChannelWiseTorchFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"})
"""Kernels with one scale per row that use the loaded codes transposed. Cutlass pads odd sizes; this is detected."""
_PLAIN_CACHES = frozenset({"auto", "bfloat16", "float16", "float32"})


def kept_as_loaded(module: Any) -> bool:
    """Whether a layer's quantised weights can be edited in place."""
    if type(getattr(module, "quant_method", None)).__name__ != _METHOD:
        return False
    scheme = getattr(module, "scheme", None)
    kind = type(scheme).__name__
    if kind == _INT8:
        return cpu_weights.keeps_codes(module)
    if kind != _FP8 or type(getattr(scheme, "fp8_linear", None)).__name__ not in _FP8_KERNELS:
        return False
    loaded = _loaded(module)
    live = {name: p for name, p in module.named_parameters(recurse=False) if name != "bias"}
    return loaded.keys() == live.keys() == {"weight", "weight_scale"} and all(
        _as_loaded(live[name], form) is not None for name, form in loaded.items()
    )


def plain_cache(module: Any) -> bool:
    """Whether an attention layer's cache holds unquantised keys and values, so that cache scales are not used."""
    return getattr(module, "kv_cache_dtype", None) in _PLAIN_CACHES


@contextmanager
def loading_form(model: torch.nn.Module) -> Iterator[None]:
    """Context manager: ``kept_as_loaded`` layers get loadable parameters. The engine must not compute meanwhile."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in model.modules():
            if not kept_as_loaded(module) or type(module.scheme).__name__ != _FP8:
                continue
            for name, form in _loaded(module).items():
                live = module._parameters[name]
                view = _as_loaded(live, form)
                assert view is not None, "kept_as_loaded has looked"
                view.__class__ = form.__class__
                view.__dict__ = form.__dict__.copy()
                replaced.append((module, name, live))
                module._parameters[name] = restore_layer_refs(view, module)
        yield
    finally:
        for module, name, live in reversed(replaced):
            module._parameters[name] = live


def _loaded(module: Any) -> dict[str, torch.Tensor]:
    """The layer's parameters in the shape that its loader expects, without data."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found: dict[str, torch.Tensor] = get_layerwise_info(module).restore_metadata[0]
    return found


def _as_loaded(live: torch.Tensor, form: torch.Tensor) -> torch.Tensor | None:
    """A view of the live parameter in its loadable shape; None if it has none."""
    data = live.data
    if data.dtype != form.dtype or data.ndim != 2:
        return None
    for view in (data, data.t()):
        if view.shape == form.shape and view.is_contiguous():
            return view
    return None
