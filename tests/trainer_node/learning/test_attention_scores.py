"""Models whose attention does more than softmax of products: bounded scores, and attention sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PretrainedConfig

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.example_rows import VOCABULARY, row
from tests.trainer_node.learning.learner_stage import ALONE
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import Packing, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.packing_check import require_separate_rows
from trainer_node.learning.trained_weights import OptimizerOptions

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOUNDED = Gemma2Config(**SIZES, attn_logit_softcapping=1.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8)
WITH_SINKS = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logprobs_of(folder: Path, tokens: torch.Tensor, attention: str) -> torch.Tensor:
    """Of all tokens but the first."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    with torch.no_grad():
        logits = module(input_ids=tokens[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_learner_bounds_scores_as_the_model_s_configuration_says(tmp_path: Path, packing: Packing) -> None:
    folder = folder_of(BOUNDED, tmp_path)
    rows = [row(seed, 20, learnt=list(range(1, 20)), temperature=1.0) for seed in (1, 2)]
    (batch,) = micro_batches([list(enumerate(rows))], 0, 64, packing)
    model = LearnerModel(folder, ALONE)
    with torch.no_grad():
        found = model.logprobs(batch)
    texts = [torch.from_numpy(one.token_ids) for one in rows]
    assert torch.allclose(found, torch.cat([logprobs_of(folder, text, "eager") for text in texts]), atol=1e-4)
    assert (found - torch.cat([logprobs_of(folder, text, "sdpa") for text in texts])).abs().max() > 0.1
    require_separate_rows(model)


@pytest.mark.parametrize(("config", "argument"), [(BOUNDED, "softcap"), (WITH_SINKS, "s_aux")])
def test_distillation_refuses_attention_that_sparse_attention_leaves_out(
    tmp_path: Path, config: PretrainedConfig, argument: str
) -> None:
    model = LearnerModel(folder_of(config, tmp_path), ALONE)
    adapter = RolloutAdapter(model, rank=2, alpha=4, options=OptimizerOptions())
    distillation = SparseDistillation(model, adapter, DistillOptions(LossOptions(), 64, "padded"), lambda version: None)
    with pytest.raises(UsageError, match=rf"has the argument {argument}, .* Set rank = 0"):
        distillation.check()
    assert model.module.config._attn_implementation == "eager"
