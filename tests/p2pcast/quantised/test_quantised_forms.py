"""Which tensors are quantised, and in which form a folder holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError, UsageError
from p2pcast.offline import state_digest
from p2pcast.quantised.folder_opening import opening
from p2pcast.quantised.live_tensors import quantised
from p2pcast.quantised.quantisation_kinds import KINDS, is_quantised
from p2pcast.quantised.quantised_layout import QuantisedLayout

STATE = {
    "model.layers.0.self_attn.q_proj.weight": (130, 260),
    "model.layers.0.self_attn.q_proj.bias": (130,),
    "model.layers.0.mlp.experts.3.up_proj.weight": (64, 32),
    "model.layers.0.mlp.gate.weight": (4, 260),
    "model.embed_tokens.weight": (50, 260),
}


def state(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in STATE.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step_0"
    made.mkdir()
    save_file(state(), made / "model.safetensors")
    (made / "config.json").write_text('{"model_type": "qwen3"}')
    return made


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (8, 8), True),
        ("model.layers.0.mlp.experts.7.down_proj.weight", (8, 8), True),
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.layers.0.mlp.gate.weight", (8, 8), False),
        ("model.embed_tokens.weight", (8, 8), False),
        ("lm_head.weight", (8, 8), False),
        ("visual.blocks.0.attn.proj.weight", (8, 8), False),
        ("model.layers.0.conv_proj.weight", (8, 8, 2), False),
        ("model.layers.0.mlp.up_proj.weight", (0, 8), False),
    ],
)
def test_weights_of_linears_are_quantised(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_quantised(Tensor(name, "BF16", shape)) is expected


def test_experts_in_one_tensor_are_refused() -> None:
    with pytest.raises(IntegrityError, match="experts in one tensor of 3 dimensions"):
        is_quantised(Tensor("model.layers.0.mlp.experts.gate_up_proj", "BF16", (4, 8, 8)))


def test_a_state_with_scales_is_refused() -> None:
    weight = Tensor("a.q_proj.weight", "BF16", (8, 8))
    with pytest.raises(IntegrityError, match="the state holds scales already"):
        QuantisedLayout(Layout([weight, Tensor("a.q_proj.weight_scale", "F32", (8, 1))]), KINDS["fp8-channel"])
    with pytest.raises(IntegrityError, match="no tensor can be quantised"):
        QuantisedLayout(Layout([Tensor("a.q_proj.weight", "F8_E4M3", (8, 8))]), KINDS["fp8-channel"])


def test_a_row_that_fills_no_word_is_refused() -> None:
    with pytest.raises(IntegrityError, match="6 columns; int8-weight-only packs four weights"):
        QuantisedLayout(Layout([Tensor("a.q_proj.weight", "BF16", (8, 6))]), KINDS["int8-weight-only"])


def test_a_quantised_configuration_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"quantization_config": {}}')
    with pytest.raises(IntegrityError, match="quantization_config: only weights as trained"):
        opening("fp8-channel")(folder).small_files()
    (folder / "config.json").write_text("[")
    with pytest.raises(IntegrityError, match="not JSON"):
        opening("fp8-channel")(folder).small_files()


def test_a_null_configuration_counts_as_none(folder: Path) -> None:
    (folder / "config.json").write_text('{"quantization_config": null}')
    files = opening("fp8-channel")(folder).small_files()
    assert json.loads(files["config.json"])["quantization_config"]["quant_method"] == "compressed-tensors"


def test_matrices_of_several_adapters_are_not_quantised(folder: Path) -> None:
    matrices = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    for number, name in enumerate(("phi", "psi")):
        (folder / name).mkdir()
        found = {n: m * number for n, m in matrices.items()}
        save_file(found, folder / name / "adapter_model.safetensors")
    source = opening("fp8-channel")(folder)
    beside = {f"{name}/{matrix}" for name in ("phi", "psi") for matrix in matrices}
    assert beside <= {tensor.name for tensor in source.layout().tensors}
    for cell in source.layout().cells:
        if (name := source.layout().tensors[cell.tensor].name) in beside:
            assert (source.words(cell).view("<f4") == (name.startswith("psi/"))).all()


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="choose one of fp8-channel"):
        opening("fp4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_the_same_however_its_cells_are_cut(folder: Path, kind: str) -> None:
    source = opening(kind)(folder)
    whole = source.layout()
    for words in (1000, 1 << 13):
        assert state_digest(source, source.layout(cell_words=words)) == state_digest(source, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_command_and_hub_and_training_loop_make_the_same_tensors(
    folder: Path, p2pcast: Callable[..., Any], kind: str
) -> None:
    out = folder.parent / "out"
    done = p2pcast("quantise", str(folder), "-o", str(out), "--kind", kind, "--json")
    assert done.returncode == 0, done.stderr
    source = opening(kind)(folder)
    assert json.loads(done.stdout)["state"] == f"{state_digest(source):016x}"
    assert Checkpoint.open(out).layout() == source.layout()
    live, saved = dict(quantised(state().items(), kind)), load_file(out / "model.safetensors")
    assert live.keys() == saved.keys()
    for name, tensor in saved.items():
        assert live[name].dtype == tensor.dtype
        assert np.array_equal(live[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = ignored.get("ignore") or ignored["modules_to_not_convert"]
    assert kept == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(
    "wrapped", ["q_proj._orig_mod", "q_proj._checkpoint_wrapped_module", "_orig_mod.q_proj", "q_proj.base_layer"]
)
def test_wrapped_linears_of_a_training_loop_are_quantised(wrapped: str) -> None:
    made = [tensor.shape for _, tensor in quantised([(f"model.{wrapped}.weight", torch.ones(4, 8))], "fp8-channel")]
    assert made == [(4, 8), (4, 1)]
    kept = dict(quantised([("model.q_proj.lora_A.phi.weight", torch.ones(4, 8))], "fp8-channel"))
    assert list(kept) == ["model.q_proj.lora_A.phi.weight"]


def test_masters_are_cast_before_quantisation() -> None:
    masters = {name: torch.randn(shape) for name, shape in STATE.items()}
    cast = {name: tensor.bfloat16() for name, tensor in masters.items()}
    for (name, found), (other, expected) in zip(
        quantised(masters.items(), "fp8-block"), quantised(cast.items(), "fp8-block"), strict=True
    ):
        assert name == other
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
