"""A random model of a few thousand weights, and its loss on micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer_node.learning.example_rows import VOCABULARY
from trainer_node.learning.objective.micro_batches import MicroBatch
from trainer_node.learning.objective.policy_loss import LossOptions, policy_loss, token_weights
from trainer_node.learning.objective.token_scores import scores_of_logits
from trainer_node.learning.objective.token_statistics import TokenStatistics
from trainer_node.learning.objective.training_rows import TrainingRow


def tiny_model(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.3,
        )
        return Qwen3ForCausalLM(config).to(dtype).train()


def logits_of(model: Qwen3ForCausalLM, batch: MicroBatch) -> torch.Tensor:
    """(B * T, V)."""
    answer = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    )
    return answer.logits.flatten(0, 1)


def logprobs_of(model: Qwen3ForCausalLM, batch: MicroBatch) -> torch.Tensor:
    """(M,)."""
    logits = logits_of(model, batch)[batch.logit_positions]
    return scores_of_logits(logits, batch.targets, batch.temperatures).logprobs


def loss_and_gradient(
    model: Qwen3ForCausalLM, options: LossOptions, rows: Sequence[TrainingRow], parts: Sequence[MicroBatch]
) -> tuple[float, dict[str, torch.Tensor], TokenStatistics]:
    """Summed over ``parts``, which hold all of ``rows``."""
    model.zero_grad()
    by_row = token_weights(rows, options.length)
    total, statistics = 0.0, TokenStatistics()
    for batch in parts:
        logprobs = logprobs_of(model, batch)
        loss, counted = policy_loss(
            options,
            logprobs,
            batch.sampler_logprobs,
            batch.advantages,
            batch.weights(by_row),
            old_logprobs=logprobs.detach() + 0.01,
            reference_logprobs=logprobs.detach() - 0.1,
        )
        loss.backward()
        total += float(loss.detach())
        statistics = statistics.add(counted)
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}, statistics
