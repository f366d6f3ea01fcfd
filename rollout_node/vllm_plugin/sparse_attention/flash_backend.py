"""Sparse attention on FlashAttention, for GPUs. It has not run on a machine with a GPU yet; `make gpu` runs it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from rollout_node.vllm_plugin.sparse_attention.paged_backend import SparseBuilder, SparseImplementation


class SparseFlashImplementation(SparseImplementation, FlashAttentionImpl):  # type: ignore[misc]
    pass


class SparseFlashBuilder(SparseBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Keeps attention out of CUDA graphs, because the number of pages changes from step to step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Always False: rows with a common prefix keep different pages of it."""
        return False

    def shorter(self, metadata: Any, seq_lens: torch.Tensor, longest: int) -> dict[str, Any]:
        # Without a precomputed schedule, the kernel makes its own.
        return {"seq_lens": seq_lens, "max_seq_len": longest, "scheduler_metadata": None, "max_num_splits": 0}


class SparseFlashBackend(FlashAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[SparseFlashImplementation]:
        return SparseFlashImplementation

    @staticmethod
    def get_builder_cls() -> type[SparseFlashBuilder]:
        return SparseFlashBuilder
