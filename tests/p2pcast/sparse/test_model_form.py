"""Figures of real models' configurations, and models that the arithmetic does not describe."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.model_form import ModelForm

QWEN3_4B: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen3_4b_has_its_four_billion_parameters() -> None:
    form = ModelForm.of_config(QWEN3_4B)
    assert form.parameters == pytest.approx(4.02e9, rel=2e-3)
    assert (form.layers, form.width, form.queries_per_key) == (36, 1024, 4)


def test_a_missing_head_size_follows_from_the_hidden_size() -> None:
    form = ModelForm.of_config(QWEN3_4B | {"head_dim": None, "hidden_size": 4096})
    assert form.width == 8 * 128


@pytest.mark.prove  # test_qwen3_4b_has_its_four_billion_parameters is the sample
def test_parameters_are_as_many_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    matrices = sum(one.numel() for one in model.parameters() if one.ndim == 2)
    assert ModelForm.of_config(config.to_dict()).parameters == matrices


def test_figures_are_read() -> None:
    assert ModelForm.parse("4.02e9:36:1024:4") == ModelForm(4.02e9, 36, 1024, 4)


@pytest.mark.parametrize(
    "text", ["", "4e9", "4e9:36:1024:x", "4e9:36:10.5:4", "0:36:1024:4", "inf:36:1024:4", "1:2:3:4:5"]
)
def test_wrong_figures_are_refused_with_their_form(text: str) -> None:
    with pytest.raises(UsageError, match="PARAMETERS:LAYERS:WIDTH:QUERIES"):
        ModelForm.parse(text)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 128},
        {"n_routed_experts": 256},
        {"kv_lora_rank": 512},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"num_key_value_heads": None},
        {"hidden_size": True},
        {"vocab_size": "151936"},
        {"num_hidden_layers": 0},
    ],
)
def test_other_models_are_refused_with_the_way_out(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="PARAMETERS:LAYERS:WIDTH:QUERIES"):
        ModelForm.of_config(QWEN3_4B | change)


@pytest.mark.parametrize("wrong", [None, [], "text"])
def test_a_configuration_is_an_object(wrong: Any) -> None:
    with pytest.raises(UsageError, match="no JSON object"):
        ModelForm.of_config(wrong)
