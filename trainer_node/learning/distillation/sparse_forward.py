"""Sparse attention in the forward pass of a transformers model, as engines decode with it.

Each decoded position of a plan attends to the pages that its own query chooses, layer by layer. A page's score is the
product of the mean query and the sum of the page's keys. Query heads that share a key head are averaged; the products
of the key heads are added (Sparrow, section 3.2). The choice has no gradient.

Guarantees:

- Layers 0 and 1, layers with a sliding window, and positions outside of the plan attend as the model does.
- A model whose layers do not ask for a plan is an error: its log-probabilities would be dense without a word. So is a
  model whose attention bounds its scores or has sinks, which would be left out.
- Outside of ``sparse_attention`` the model computes bit for bit as before.

Memory: a mask of positions x positions in each layer, one byte for each pair. 8192 positions take 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import DENSE_LAYERS
from trainer_node.learning.distillation.decoding_plan import DecodingPlan, chosen_pages

NAME: Final = "p2pcast_sparse"
"""Of the attention function, among those of transformers."""
PLAN: Final = "p2pcast_plan"
"""Keyword under which a forward pass hands its plan to the attention function."""
_LEFT_OUT: Final = ("softcap", "s_aux")
"""Arguments of attention functions that sdpa ignores without an error: a bound of the scores, and attention sinks."""


@contextmanager
def sparse_attention(module: Any) -> Iterator[None]:
    """Forward passes inside need a plan under the keyword PLAN; backward passes that compute activations again belong
    inside too. Raises UsageError for a model whose attention cannot be replaced.
    """
    if not getattr(module, "_supports_attention_backend", False):
        raise UsageError(
            f"[distill] does not fit a model of the type {module.config.model_type}: transformers cannot replace its"
            " attention. Set rank = 0"
        )
    _register()
    before = module.config._attn_implementation
    module.set_attn_implementation(NAME)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **how: Any
) -> tuple[torch.Tensor, None]:
    """``query`` (B, query heads, Q, size). ``key``, ``value`` (B, key heads, T, size); the last Q are the queries' own.
    ``mask`` bool, broadcast to (B, 1, Q, T); None: causal.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plan: DecodingPlan | None = how.pop(PLAN, None)
    if plan is None:
        raise UsageError(
            f"[distill] does not fit the model: its layers of the class {type(module).__name__} hand no keywords to"
            " attention. Set rank = 0"
        )
    if missing := [name for name in _LEFT_OUT if how.get(name) is not None]:
        raise UsageError(
            f"[distill] does not fit the model: attention of the class {type(module).__name__} has the argument"
            f" {missing[0]}, which p2pcast's sparse attention leaves out. Set rank = 0"
        )
    if plan.places.numel() and module.layer_idx >= DENSE_LAYERS and how.get("sliding_window") is None:
        mask = _shorter(plan, _chosen(plan, query, key), mask, query.shape[0], query.shape[2], key.shape[2])
    found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **how)
    return found


def _chosen(plan: DecodingPlan, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(S, P) bool."""
    heads, size, query, key = key.shape[1], key.shape[3], query.detach(), key.detach()
    keys = key.transpose(1, 2).reshape(-1, heads, size).float()
    sums = keys.new_zeros((int(plan.page_of[-1]) + 1, heads, size)).index_add_(0, plan.page_of, keys)
    queries = query.transpose(1, 2).reshape(-1, heads, query.shape[1] // heads, size)[plan.places]
    scores = torch.einsum("shd,phd->sp", queries.float().mean(dim=2), sums)
    return chosen_pages(plan, scores)


def _shorter(
    plan: DecodingPlan, chosen: torch.Tensor, mask: torch.Tensor | None, sequences: int, queries: int, keys: int
) -> torch.Tensor:
    """The mask without the pages that were not chosen, (B, 1, Q, T)."""
    if mask is None:
        mask = torch.ones((queries, keys), dtype=torch.bool, device=chosen.device).tril(keys - queries)
    whole = mask.expand(sequences, 1, queries, keys).reshape(sequences * queries, keys).clone()
    pages = plan.page_of.view(sequences, keys)[plan.places // queries]
    whole[plan.places] &= chosen.gather(1, pages)
    return whole.view(sequences, 1, queries, keys)
