"""Models whose configuration has dropout: no pass of a learner has any, since engines have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXJapaneseConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
)

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.example_rows import VOCABULARY, row
from tests.trainer_node.learning.learner_stage import ALONE
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.guarding.acceptance_scores import acceptance_rates
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.objective.judged_tokens import JudgedTokens
from trainer_node.learning.objective.micro_batches import micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights

pytestmark = pytest.mark.device

CONFIGS: dict[str, PretrainedConfig] = {
    "of attention": Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, attention_dropout=0.5,
    ),
    "of modules": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, resid_pdrop=0.5,
        embd_pdrop=0.5, attn_pdrop=0.5,
    ),
    "of layers": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, init_std=0.2, dropout=0.5, attention_dropout=0.5,
        layerdrop=0.5, pad_token_id=0,
    ),
}  # fmt: skip
SCHEDULE = bytes(range(32))


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def sampled(folder: Path, one: TrainingRow) -> TrainingRow:
    """With the log-probabilities of an engine: the model's own, and the three most probable tokens of each place."""
    engine: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.from_numpy(one.token_ids)[None]).logits[0] / one.temperature
    (places,) = np.nonzero(one.learnt)
    found = torch.log_softmax(logits, -1)[places - 1]
    logprobs = np.zeros(one.tokens, np.float32)
    logprobs[places] = found.gather(1, torch.from_numpy(one.token_ids[places])[:, None])[:, 0].numpy()
    judged = JudgedTokens(SCHEDULE, places, np.tile(np.arange(VOCABULARY), (len(places), 1)), found.numpy())
    return replace(one, logprobs=logprobs, judged=[judged])


@pytest.mark.parametrize("recompute", [False, True])
def test_the_policy_is_the_sampler(folder: Path, recompute: bool) -> None:
    model = LearnerModel(folder, ALONE, recompute=recompute)
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions())
    rows = [sampled(folder, row(seed, 20, single_version=0)) for seed in (1, 2)]
    options = StepOptions(LossOptions("tis", kl_weight=0.1), 64, "padded")
    reference = LearnerModel(folder, ALONE)
    found = LearnerStep(model, weights, options, ALONE, reference).train(rows, 0, lambda: None).statistics.document()
    assert found["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert found["kl_same_version"] == pytest.approx(0, abs=1e-7)
    assert found["kl_reference"] == pytest.approx(0, abs=1e-7)


def test_the_guard_accepts_all_that_dense_attention_samples(folder: Path) -> None:
    rows = [sampled(folder, row(seed, 20)) for seed in (1, 2)]
    rates = acceptance_rates(LearnerModel(folder, ALONE), ALONE, rows, 64, "padded", lambda name: True)
    assert sum(len(one.alphas) for one in rates) == sum(row.learnt_tokens for row in rows)
    assert all(one.alphas.min() > 1 - 1e-4 for one in rates)


@pytest.mark.parametrize("folder", ["of attention"], indirect=True)
def test_phi_begins_at_the_policy(folder: Path) -> None:
    """Dense versions: phi's own pass and its reference are the same function, until phi has learnt something."""
    model = LearnerModel(folder, ALONE)
    adapter = RolloutAdapter(model, rank=2, alpha=4, options=OptimizerOptions())
    distillation = SparseDistillation(model, adapter, DistillOptions(LossOptions(), 64), lambda version: None)
    report = distillation.train([sampled(folder, row(seed, 20)) for seed in (1, 2)], 0, lambda: None)
    assert report.kl == pytest.approx(0, abs=1e-7)
    assert report.kl_sampler == pytest.approx(0, abs=1e-7)
    assert report.acceptance == pytest.approx(1, abs=1e-4)


def test_recomputation_saves_activations_and_changes_no_gradient(folder: Path) -> None:
    plain, recomputed = (LearnerModel(folder, ALONE, recompute=recompute) for recompute in (False, True))
    forward, backward = passes_of_norms(plain)
    assert (forward > 0, backward) == (True, 0)
    again = passes_of_norms(recomputed)
    assert again[0] == forward
    assert again[1] > 0
    for name, parameter in plain.parameters.items():
        other = recomputed.parameters[name].grad
        assert parameter.grad is not None
        assert other is not None
        assert torch.allclose(parameter.grad, other, atol=1e-5), name


def passes_of_norms(model: LearnerModel) -> tuple[int, int]:
    """In a forward pass, and in its backward pass."""
    passes: list[object] = []
    for part in model.module.modules():
        if "Norm" in type(part).__name__:
            part.register_forward_hook(lambda module, given, answer: passes.append(module))
    (batch,) = micro_batches([[(0, row(1, 20))]], 0, 64, "padded")
    logprobs = model.logprobs(batch).sum()
    forward = len(passes)
    logprobs.backward()
    return forward, len(passes) - forward


def test_a_model_whose_layers_cannot_be_computed_again_is_refused(tmp_path: Path) -> None:
    config = GPTNeoXJapaneseConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"\[model\] recompute"):
        LearnerModel(tmp_path, ALONE, recompute=True)
