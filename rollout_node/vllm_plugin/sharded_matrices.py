"""An adapter's matrices under tensor parallelism: which part of them a rank computes with.

A rank of a column-parallel layer has rows of B, and one of a row-parallel layer columns of A. The other matrix is
whole on each rank. Several ranks may have the same key and value heads. Promise: the shares are those that vLLM's own
layers cut, by their own methods.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers import (
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
)


def share_of_rank(layer: Any, part: int, matrix: torch.Tensor, *, is_a: bool) -> torch.Tensor:
    """The share of A (rank, columns) or B (rows, rank) of part ``part`` of one of vLLM's plain linear LoRA layers. A
    view where the share is one range.
    """
    found = matrix
    if layer.tp_size > 1:
        cut = layer.slice_lora_a if is_a else layer.slice_lora_b
        if isinstance(layer, MergedColumnParallelLinearWithLoRA):
            found = cut([matrix if n == part else None for n in range(layer.n_slices)])[part]
        else:
            found = cut(matrix)
    return found


def whole_size(layer: Any, part: int, *, is_a: bool) -> int:
    """Columns of A or rows of B, those of all ranks."""
    base = layer.base_layer
    if is_a:
        return int(base.input_size)
    if isinstance(layer, QKVParallelLinearWithLoRA | MergedQKVParallelLinearWithLoRA):
        # vLLM's output sizes count a key head as often as ranks have it.
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        rows = [base.head_size * count for count in heads]
        return rows[part] if layer.n_slices > 1 else sum(rows)
    if isinstance(layer, MergedColumnParallelLinearWithLoRA):
        return int(base.output_sizes[part])
    return int(base.output_size)
