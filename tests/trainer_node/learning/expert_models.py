"""Small mixture-of-experts models, in folders as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EXPERTS, INNER, HIDDEN = 4, 16, 32


def qwen3_moe(vocabulary: int = 40, chosen: int = 2) -> Any:
    """Every second layer has experts. ``chosen``: experts that compute a token."""
    config = Qwen3MoeConfig(
        **_common(vocabulary, chosen), intermediate_size=48, moe_intermediate_size=INNER, head_dim=16,
        num_experts=EXPERTS, decoder_sparse_step=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def qwen2_moe(vocabulary: int = 40, chosen: int = 2, norm_topk_prob: bool = False) -> Any:
    """Experts beside one expert for all tokens; gates that do not sum to 1, unless ``norm_topk_prob``."""
    config = Qwen2MoeConfig(
        **_common(vocabulary, chosen), moe_intermediate_size=INNER, num_experts=EXPERTS,
        shared_expert_intermediate_size=24, norm_topk_prob=norm_topk_prob,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def mixtral(vocabulary: int = 40, chosen: int = 2) -> Any:
    config = MixtralConfig(**_common(vocabulary, chosen), intermediate_size=INNER, num_local_experts=EXPERTS)
    return MixtralForCausalLM(config)


def _common(vocabulary: int, chosen: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_experts_per_tok": chosen, "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }  # fmt: skip


def experts_folder(folder: Path, make: Any = qwen3_moe, *, dtype: torch.dtype = torch.bfloat16, **form: int) -> Path:
    """``make``: the model of ``form``, drawn with a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        make(**form).to(dtype).save_pretrained(folder)
    return folder
