"""Sparse attention on the kernel of vLLM's CPU build, whose pages hold a multiple of 32 tokens."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from rollout_node.vllm_plugin.sparse_attention.paged_backend import SparseBuilder, SparseImplementation


class SparseCPUImplementation(SparseImplementation, CPUAttentionBackendImpl):  # type: ignore[misc]
    pass


class SparseCPUBuilder(SparseBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    def shorter(self, metadata: Any, seq_lens: torch.Tensor, longest: int) -> dict[str, Any]:
        scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=metadata.dynamic_causal,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return {"seq_lens": seq_lens, "max_seq_len": longest, "scheduler_metadata": scheduler_metadata}


class SparseCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[SparseCPUImplementation]:
        return SparseCPUImplementation

    @staticmethod
    def get_builder_cls() -> type[SparseCPUBuilder]:
        return SparseCPUBuilder
