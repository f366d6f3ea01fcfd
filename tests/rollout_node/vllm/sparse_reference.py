"""Sparse attention as Sparrow describes it, in transformers, one token after the other and with plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DENSE_LAYERS = 2


class Reference:
    """``kept``: pages of ``page`` tokens that each decoded token attends to; None: all. ``dropped``: counts pages that
    were left out.
    """

    def __init__(self, folder: Path, page: int, kept: int | None) -> None:
        self._page, self._kept, self.dropped = page, kept, 0
        name = f"p2pcast_reference_{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.set_attn_implementation(name)

    def logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Of the answer's tokens, given those before."""
        found = []
        with torch.inference_mode():
            out = self._model(torch.tensor([prompt]), use_cache=True)
            for token in answer:
                found.append(out.logits[0, -1].log_softmax(-1)[token].item())
                out = self._model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        return found

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any
    ) -> tuple[torch.Tensor, None]:
        group, (_, _, there, _), new = query.shape[1] // key.shape[1], key.shape, query.shape[2]
        allowed = torch.ones(new, there, dtype=torch.bool).tril(there - new)
        if new == 1 and module.layer_idx >= DENSE_LAYERS and self._kept is not None:
            allowed = self._chosen(query[0, :, 0], key[0], group)[None]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * how["scaling"]
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    def _chosen(self, query: torch.Tensor, key: torch.Tensor, group: int) -> torch.Tensor:
        """Allowed places, of shape (places,)."""
        heads, there, _ = key.shape
        pages = -(-there // self._page)
        keep = {0, pages - 2, pages - 1}
        score = {}
        for page in range(1, pages - 2):
            inside = key[:, page * self._page : (page + 1) * self._page]
            score[page] = sum(
                float(query[h * group : (h + 1) * group].mean(0) @ inside[h].mean(0)) for h in range(heads)
            )
        assert self._kept is not None
        best = sorted(score, key=score.__getitem__, reverse=True)
        keep |= set(best[: self._kept - len(keep)])
        self.dropped += max(0, pages - len(keep))
        return torch.tensor([place // self._page in keep for place in range(there)])
