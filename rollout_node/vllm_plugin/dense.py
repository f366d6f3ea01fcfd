"""Whole tensors from the shadow into the engine: first contact, restarts, and loaders that transform values.

Promise: mapped tensors are copied block by block into existing storage, device memory bounded by
``INSTALL_CHUNK_BYTES``; the others go through the model's own loader. There is no way back but another dense install.
"""

from __future__ import annotations

from typing import Any

import torch

from p2pcast import limits
from p2pcast.codec.layout import Layout
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
    values, MLA's matrices, reordered experts), into the storage that it already has."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.inference_mode():
        initialize_layerwise_reload(model)
        model.load_weights(shadow.all())
        finalize_layerwise_reload(model, model_config)
