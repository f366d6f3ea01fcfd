"""The form of a model for its loader, where vLLM has wrapped layers for LoRA.

With ``--enable-lora`` vLLM puts a layer of its own around each linear one, after loading. The parameters then have
other names (``….base_layer.weight``) than those for which the model's loader looks. Promise: ``without_lora_layers``
shares every parameter and buffer with the served model, and changes nothing in that model, so a loader may be recorded
and rehearsed while the engine computes.
"""

from __future__ import annotations

import torch
from vllm.lora.layers import BaseLayerWithLoRA


def without_lora_layers(model: torch.nn.Module) -> torch.nn.Module:
    """The model with the layers inside LoRA's in their place; the model itself if it has none."""
    return _unwrapped(model, {})


def _unwrapped(module: torch.nn.Module, known: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    if module in known:
        return known[module]
    if isinstance(module, BaseLayerWithLoRA):
        found = _unwrapped(module.base_layer, known)
    else:
        parts = {n: None if part is None else _unwrapped(part, known) for n, part in module._modules.items()}
        found = module
        if any(parts[name] is not part for name, part in module._modules.items()):
            # The dictionaries of parameters and buffers are shared: a parameter that vLLM rebinds is found here too.
            found = object.__new__(type(module))
            vars(found).update(vars(module), _modules=parts)
    known[module] = found
    return found
