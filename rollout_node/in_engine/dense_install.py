"""Copies whole tensors from the shadow into an engine's parameters: the first install, and installs after a restart.

Promise: mapped tensors are copied block by block into existing storage; device memory is bounded by
``INSTALL_CHUNK_BYTES``. Tensors whose loader transforms values go through the model's own loader. A dense install can
only be undone by another dense install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from rollout_node.in_engine.loader_recording import Storages
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.weight_mapping import Mapping

ReloadAll = Callable[[ShadowReader], None]
"""Loads every tensor as the engine does at its start, with all that the engine derives from the weights, into the
storage that the model already has. Each engine's plugin provides one. Raises IntegrityError when the shadow lacks a
parameter.
"""


def install_dense(shadow: ShadowReader, layout: Layout, mapping: Mapping, storages: Storages, model: Any) -> None:
    """Overwrite all weights with the shadow's values. ``mapping.reload`` goes through ``model.load_weights``."""
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
