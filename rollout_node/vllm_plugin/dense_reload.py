"""Reloads a whole model through vLLM's own start-up path, for models that compute from derived weights."""

from __future__ import annotations

from typing import Any

import torch

from p2pcast.ground.errors import IntegrityError
from rollout_node.in_engine.shadow_reader import ShadowReader


def reload_all(shadow: ShadowReader, model: Any, model_config: Any) -> None:
    """Load all tensors layer by layer, as at the start, into the existing storage, and derive values from these again.

    Derived values are, for example, quantised weights, MLA's matrices and reordered experts. Raises IntegrityError if
    the shadow has no tensor for a parameter, which then keeps its value.
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
    """Parameters without a loaded tensor. Completed layers are already finalised and are not listed."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        info = get_layerwise_info(module)
        if info.can_load():
            loaded_names = {parameter for parameter, _ in info.loaded_weights}
            missing = (p for p, t in info.restore_metadata[0].items() if t.numel() > 1 and p not in loaded_names)
            found += [f"{name}.{parameter}" if name else parameter for parameter in missing]
    return found
