"""How a rank proves which version it holds.

A chain of three checks, each O(changed); only the last runs during the pause:

1. *prepare*: for each block of a changed tensor, the digest of (new - live) over this rank's changed values. The sum
over all ranks, replicas counted once, must equal the growth of the tensor's digest that the patch states
(``weight_audit.compare``). It follows that the staged values everywhere are the patch's, and that the live values at
these positions are its base's.

2. *prepare*: ``mark`` of the staged values and of their positions in the engine's storages.

3. *commit*: the same mark, computed from the values read back from these positions after the write. A rank that wrote
no values, or the wrong ones, reports a different number from the one that it prepared.

A dense install is read back and compared with the shadow bit by bit; its mark is the number of equal elements. Not
covered: tensors that only the model's own loader can install (``Mapping.reload``). These rely on the loader.

A mark is a checksum against accidents within one process. No format contains it, and releases need not agree on it.
"""

from __future__ import annotations

import torch

from p2pcast.codec.digest import MASK
from p2pcast.ground import limits
from rollout_node.in_engine.loader_recording import Storages
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.weight_mapping import Mapping

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def mark(where: torch.Tensor, values: torch.Tensor) -> int:
    """Σ value · w(position) mod 2⁶⁴ with odd, distinct w, computed on the tensors' device.

    A value that is changed, missing or at a different position changes the sum.
    """
    weights = where.to(torch.int64) * _GOLDEN
    weights |= 1
    weights *= values  # in place, in 64 bits: overflow wraps
    return int(weights.sum().item()) & MASK


def mapped_elements(mapping: Mapping) -> int:
    """Return the number of mapped elements, which is the mark that a successful dense install must produce."""
    return sum(block.elements for blocks in mapping.blocks.values() for block in blocks)


def equal_elements(shadow: ShadowReader, mapping: Mapping, storages: Storages) -> int:
    """Return the number of mapped elements equal to the shadow's; a part with any difference counts as 0."""
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
