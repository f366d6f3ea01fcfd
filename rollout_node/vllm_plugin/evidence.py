"""What a rank can prove about a version, so that nobody has to take its word.

A chain of three links, each O(changed); only the last is worked at under the pause:

1. *prepare*: for each block whose tensor changes, the digest of (new - live) over the changed values of this rank. Added up
   over all ranks, replicas once, it has to be what the patch says that the tensor's digest grows by
   (``audit.compare``): so what is staged everywhere is the patch, and what lives everywhere at these places is its base.
2. *prepare*: ``mark`` of the staged values and of the places in the engine's storages that they go to.
3. *commit*: the same mark, taken of what is read back from those places after the write. A rank that wrote nothing, or
   something else, reports another number than it prepared.

A dense install is read back and compared with the shadow bit by bit; its mark is the number of elements found equal.
Not covered: tensors that only the model's own loader can install (``Mapping.reload``). They rest on the loader.

A mark is a checksum against accidents within one process. It crosses no format and no version of p2pcast.
"""

from __future__ import annotations

import torch

from p2pcast import limits
from p2pcast.codec.digest import MASK
from rollout_node.vllm_plugin.mapping import Mapping
from rollout_node.vllm_plugin.recording import Storages
from rollout_node.vllm_plugin.shadow_reader import ShadowReader

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def mark(where: torch.Tensor, values: torch.Tensor) -> int:
    """Σ value · w(position) mod 2⁶⁴, w odd and distinct: on whatever device the two are. A value that changes, is missing
    or stands elsewhere changes the sum."""
    weights = where.to(torch.int64) * _GOLDEN
    weights |= 1
    weights *= values  # in place, in 64 bits: overflow wraps
    return int(weights.sum().item()) & MASK


def mapped_elements(mapping: Mapping) -> int:
    """The mark of a dense install that arrived."""
    return sum(block.elements for blocks in mapping.blocks.values() for block in blocks)


def equal_elements(shadow: ShadowReader, mapping: Mapping, storages: Storages) -> int:
    """How many mapped elements are those of the shadow, told part by part: a part with a difference counts as nothing."""
    found = 0
    with torch.inference_mode():
        for number, blocks in mapping.blocks.items():
            for block in blocks:
                words = storages.table[block.storage].words
                source = shadow.words(number, words.dtype)
                for part in block.split(limits.INSTALL_CHUNK_BYTES // words.element_size()):
                    live = words.as_strided(part.shape, part.to_stride, part.at)
                    if torch.equal(live, source.as_strided(part.shape, part.from_stride, part.start).to(words.device)):
                        found += part.elements
    return found
