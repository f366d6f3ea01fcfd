"""Shares of an adapter's matrices beside what vLLM's own layers write, for each rank of engines of several sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the modules that vLLM imports
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora import layers
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    from rollout_node.vllm_plugin.adapter_slots import share_of_rank, whole_size

HIDDEN, HEAD, HEADS, KEY_HEADS, MLP = 16, 4, 8, 2, 24
RANK, LARGEST = 3, 4
ATTENTION = HEADS * HEAD
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int, list[int]]] = {
    "column": (
        lambda: linear.ColumnParallelLinear(HIDDEN, MLP, bias=False),
        lambda base: layers.ColumnParallelLinearWithLoRA(base),
        HIDDEN,
        [MLP],
    ),
    "column of two": (
        lambda: linear.MergedColumnParallelLinear(HIDDEN, [MLP, MLP], bias=False),
        lambda base: layers.ColumnParallelLinearWithLoRA(base),
        HIDDEN,
        [2 * MLP],
    ),
    "merged": (
        lambda: linear.MergedColumnParallelLinear(HIDDEN, [MLP, MLP], bias=False),
        lambda base: layers.MergedColumnParallelLinearWithLoRA(base),
        HIDDEN,
        [MLP, MLP],
    ),
    "row": (
        lambda: linear.RowParallelLinear(MLP, HIDDEN, bias=False),
        lambda base: layers.RowParallelLinearWithLoRA(base),
        MLP,
        [HIDDEN],
    ),
    "qkv": (
        lambda: linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KEY_HEADS, bias=False),
        lambda base: layers.QKVParallelLinearWithLoRA(base),
        HIDDEN,
        [ATTENTION + 2 * KEY_HEADS * HEAD],
    ),
    "merged qkv": (
        lambda: linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KEY_HEADS, bias=False),
        lambda base: layers.MergedQKVParallelLinearWithLoRA(base),
        HIDDEN,
        [ATTENTION, KEY_HEADS * HEAD, KEY_HEADS * HEAD],
    ),
    "replicated": (
        lambda: linear.ReplicatedLinear(HIDDEN, MLP, bias=False),
        lambda base: layers.ReplicatedLinearWithLoRA(base),
        HIDDEN,
        [MLP],
    ),
}
"""vLLM's layer, its LoRA layer, columns of A, rows of each part's B."""


def layer_of(kind: str, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    base, lora, _, _ = KINDS[kind]
    with set_current_vllm_config(VllmConfig()):
        layer = lora(base())
        layer.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32))
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_all_ranks_equal_vllm_s_slots(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four ranks, two of them have each key head."""
    _, _, columns, rows = KINDS[kind]
    draw = torch.Generator().manual_seed(1)
    a = [torch.randn(RANK, columns, generator=draw) for _ in rows]
    b = [torch.randn(count, RANK, generator=draw) for count in rows]
    for rank in range(ranks):
        layer = layer_of(kind, rank, ranks, monkeypatch)
        layer.set_lora(0, *((a[0], b[0]) if len(rows) == 1 else (a, b)))
        for part in range(len(rows)):
            assert whole_size(layer, part, is_a=True) == columns
            assert whole_size(layer, part, is_a=False) == rows[part]
            for stacked, matrices, is_a in ((layer.lora_a_stacked, a, True), (layer.lora_b_stacked, b, False)):
                expected, share = stacked[part][0, 0].clone(), share_of_rank(layer, part, matrices[part], is_a=is_a)
                found = torch.zeros_like(expected)
                found[: share.shape[0], : share.shape[1]] = share
                assert share.any()
                assert torch.equal(found, expected)
