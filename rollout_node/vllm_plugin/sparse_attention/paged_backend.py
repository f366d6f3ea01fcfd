"""Mixins that make vLLM's paged attention backends sparse: for the metadata builder and for the implementation.

The wrapped backend's kernel is called as usual, but with a shorter block table and shorter sequences for decoding rows.
Keys are rotated before caching and so carry their positions, which lets a page move within the table.

Guarantees:

- Without a schedule, and for rows within their budget, the wrapped backend gets its own metadata: bit for bit dense.
- Layers 0 and 1, prompts, and layers whose pages mean something else (sliding windows, ALiBi, shared caches) are dense.
- A server in which anything but its attention layers writes the cache is refused: the key sums would be wrong.

A step's plan is made once for all layers; each layer chooses its own pages.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index

from p2pcast.ground.errors import LocalError
from p2pcast.sparse.budget_schedule import DENSE_LAYERS
from rollout_node.vllm_plugin.sparse_attention import budget_in_use
from rollout_node.vllm_plugin.sparse_attention.page_choice import KeySums, choose_pages
from rollout_node.vllm_plugin.sparse_attention.step_plan import StepPlan, plan_step

_STEP: Final = "p2pcast_step"


class _Step(NamedTuple):
    """A plan as tensors on the device. ``first_token``: index in the batch of each shortened row's token; ``changes``:
    metadata fields to replace, besides the block table.
    """

    rows: torch.Tensor
    first_token: torch.Tensor
    pages: torch.Tensor
    kept: torch.Tensor
    most_pages: int
    most_kept: int
    changes: dict[str, Any]


class SparseBuilder:
    """Mixin to be placed before a backend's metadata builder."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if unfit := unfit_settings(vllm_config):
            raise LocalError(f"sparse attention does not work with {unfit}; start the server without one of them")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._page_tokens = int(kv_cache_spec.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        schedule = budget_in_use.in_use()
        if schedule is None or common_attn_metadata.is_prefilling is None:
            return found
        batch = common_attn_metadata
        lens = batch.seq_lens if batch.seq_lens_cpu_upper_bound is None else batch.seq_lens_cpu_upper_bound
        seq_lens = lens.cpu().numpy().astype(np.int64)
        starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
        prefilling = batch.is_prefilling.cpu().numpy()
        plan = plan_step(seq_lens, np.diff(starts), prefilling, schedule, self._page_tokens)
        if plan is not None:
            setattr(found, _STEP, self._step(plan, starts, found))
        return found

    def _step(self, plan: StepPlan, starts: np.ndarray, metadata: Any) -> _Step:
        like = metadata.seq_lens
        rows, first, pages, kept = (
            torch.from_numpy(array).to(like.device) for array in (plan.rows, starts[plan.rows], plan.pages, plan.kept)
        )
        seq_lens = torch.from_numpy(plan.seq_lens).to(like.device, like.dtype)
        changes = self.shorter(metadata, seq_lens, int(plan.seq_lens.max()))
        return _Step(rows, first, pages, kept, int(plan.pages.max()), int(plan.kept.max()), changes)

    @abstractmethod
    def shorter(self, metadata: Any, seq_lens: torch.Tensor, longest: int) -> dict[str, Any]:
        """Return the metadata fields for shorter sequences, besides the block table."""


class SparseImplementation:
    """Mixin to be placed before a backend's implementation. The cache's shape is (pages, heads, tokens, 2 × size)."""

    _sums: KeySums | None = None
    _is_sparse: bool | None = None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        if not self.follows_schedule(layer):
            return
        pages, heads, page_tokens, _ = kv_cache.shape
        if self._sums is None or (self._sums.pages, self._sums.page_tokens) != (pages, page_tokens):
            self._sums = KeySums(pages, heads, key.shape[-1], page_tokens, key.device)
        tokens = slot_mapping.shape[0]
        self._sums.add(key[:tokens], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, _STEP, None)
        if step is not None and self._sums is not None and self.follows_schedule(layer):
            table = self._shorter_table(step, query, attn_metadata.block_table)
            attn_metadata = dataclasses.replace(attn_metadata, block_table=table, **step.changes)
        found: torch.Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *more, **named
        )
        return found

    def _shorter_table(self, step: _Step, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert self._sums is not None
        rows = table[step.rows, : step.most_pages]
        scores = self._sums.scores(query[step.first_token], rows)
        chosen = choose_pages(scores, step.pages, step.kept, step.most_kept)
        shorter = table.clone()
        shorter[step.rows, : step.most_kept] = rows.gather(1, chosen)
        return shorter

    def follows_schedule(self, layer: Any) -> bool:
        """Whether this implementation's layer is ever sparse."""
        if self._is_sparse is None:
            impl: Any = self
            plain = impl.attn_type == "decoder" and impl.alibi_slopes is None
            # vLLM's backends represent "no window" as -1, (-1, -1) or None.
            plain &= impl.sliding_window in (None, -1, (-1, -1))
            plain &= getattr(impl, "kv_sharing_target_layer_name", None) is None
            self._is_sparse = plain and extract_layer_index(layer.layer_name) >= DENSE_LAYERS
        return self._is_sparse


def unfit_settings(vllm_config: Any) -> str | None:
    """Return a server setting with which keys bypass ``do_kv_cache_update`` or are written twice; None if there is
    none.
    """
    parallel = vllm_config.parallel_config
    found = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
    }
    return next((name for name, there in found.items() if there), None)
