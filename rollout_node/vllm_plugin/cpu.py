"""vLLM's CPU build packs a copy of each linear's weight after loading and empties the original; edits would change nothing.

Promise: once ``keep_weights_in_place`` has run, layers loaded afterwards compute from their own weight; ``check`` tells
of any that doesn't.
"""

from __future__ import annotations

import torch


def keep_weights_in_place() -> None:
    """Have linears and embeddings call torch's linear on their weight. Call before the model is loaded."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _plain


def _plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def check(model: torch.nn.Module) -> list[str]:
    """Names of the modules that compute from a packed copy."""
    linear = torch.nn.functional.linear
    packed = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        emptied = isinstance(weight, torch.Tensor) and weight.numel() == 0
        experts = type(getattr(module, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"
        if emptied or experts or getattr(module, "cpu_linear", linear) is not linear:
            packed.append(name)
    return packed
