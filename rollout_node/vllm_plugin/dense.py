"""Whole tensors from the shadow into the engine: first contact, restarts, and loaders that transform values.

Promise: mapped tensors are copied block by block into existing storage, device memory bounded by
``INSTALL_CHUNK_BYTES``; the others go through the model's own loader. There is no way back but another dense install.
"""

from __future__ import annotations

from typing import Any

import torch

from p2pcast import limits
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError
from rollout_node.vllm_plugin.mapping import Mapping
from rollout_node.vllm_plugin.recording import Storages
from rollout_node.vllm_plugin.shadow_reader import ShadowReader


def install_dense(shadow: ShadowReader, layout: Layout, mapping: Mapping, storages: Storages, model: Any) -> None:
    """Overwrite all weights with the shadow's."""
    with torch.inference_mode():
        for view, value in storages.fills:
            view.fill_(value)
        for number, blocks in mapping.blocks.items():
            for block in blocks:
                words = storages.table[block.storage].words
                source = shadow.words(number, words.dtype)
                for part in block.split(limits.INSTALL_CHUNK_BYTES // words.element_size()):
                    to = words.as_strided(part.shape, part.to_stride, part.at)
                    to.copy_(source.as_strided(part.shape, part.from_stride, part.start))
        if mapping.reload:
            model.load_weights((layout.tensors[n].name, shadow.tensor(n)) for n in sorted(mapping.reload))


def reload_all(shadow: ShadowReader, model: Any, model_config: Any) -> None:
    """Load everything again as at start, layer by layer, with whatever the engine derives from the weights (quantised
    values, MLA's matrices, reordered experts), into the storage that it already has.

    Raises IntegrityError when the shadow has nothing for a parameter, which then keeps what it had.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    with torch.inference_mode(), set_default_torch_dtype(model_config.dtype):  # as at start: kernels are built by it
        initialize_layerwise_reload(model)
        try:
            model.load_weights(shadow.all())
        finally:  # or its parameters would have no data any more
            passed_by = _passed_by(model)
            finalize_layerwise_reload(model, model_config)
    live = dict(model.named_parameters(remove_duplicate=False))
    loaded = {p.data_ptr() for name, p in live.items() if name not in passed_by}
    lost = [name for name in passed_by if name in live and live[name].data_ptr() not in loaded]  # else it is tied to another
    if lost:
        raise IntegrityError(f"no tensor of the run's layout reaches {lost[0]}; does the engine serve the model that is trained?")


def _passed_by(model: Any) -> list[str]:
    """Parameters that the loader has brought nothing for. Layers that are complete are done with already."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        info = get_layerwise_info(module)
        if info.can_load():
            came = {parameter for parameter, _ in info.loaded_weights}
            missing = (p for p, t in info.restore_metadata[0].items() if t.numel() > 1 and p not in came)
            found += [f"{name}.{parameter}" if name else parameter for parameter in missing]
    return found
