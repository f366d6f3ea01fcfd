"""Sparse attention over FlashAttention, on GPUs. No machine with a GPU has run this module yet: `make gpu` does."""

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
    """Attention stays outside CUDA graphs: the number of pages changes from step to step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Rows with a common prefix keep different pages of it."""
        return False

    def shorter(self, metadata: Any, seq_lens: torch.Tensor, longest: int) -> dict[str, Any]:
        # Without a schedule made ahead, the kernel makes its own.
        return {"seq_lens": seq_lens, "max_seq_len": longest, "scheduler_metadata": None, "max_num_splits": 0}


class SparseFlashBackend(FlashAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[SparseFlashImplementation]:
        return SparseFlashImplementation

    @staticmethod
    def get_builder_cls() -> type[SparseFlashBuilder]:
        return SparseFlashBuilder
