"""Models whose packed rows change each other are refused at the start; real architectures of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, PretrainedConfig, Qwen3Config

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.learner_stage import ALONE
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, TrainTable
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_startup import model_of
from trainer_node.learning.packing_check import packing_error

pytestmark = pytest.mark.device

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    ),
    # Learnt positions, and dropout in its configuration.
    "gpt2": GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
    "mamba": MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.2),
}


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> LearnerConfig:
    name, dtype, packing = request.param
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).save_pretrained(tmp_path / name)
    return LearnerConfig(model=ModelTable(path=tmp_path / name), train=TrainTable(packing=packing))


@pytest.mark.parametrize(
    "config",
    [(name, dtype, "packed") for name in ("qwen3", "gpt2") for dtype in (torch.float32, torch.bfloat16)],
    indirect=True,
)
def test_attention_that_separates_rows_is_packed(config: LearnerConfig) -> None:
    model = model_of(config, ALONE)
    error, leak, rounding = packing_error(model)
    assert error <= rounding < leak


@pytest.mark.parametrize(
    "config", [("mamba", dtype, "packed") for dtype in (torch.float32, torch.bfloat16)], indirect=True
)
def test_recurrent_layers_are_refused_with_the_remedy(config: LearnerConfig) -> None:
    with pytest.raises(UsageError, match=r"a packed row differs from the row alone .* set packing = 'padded'"):
        model_of(config, ALONE)


@pytest.mark.parametrize("config", [("mamba", torch.float32, "padded")], indirect=True)
def test_recurrent_layers_train_on_padded_rows(config: LearnerConfig) -> None:
    model = model_of(config, ALONE)
    assert isinstance(model, LearnerModel)
    error, leak, _ = packing_error(model)
    assert error == pytest.approx(leak, rel=1e-4), "a recurrent layer leaks the whole row"
