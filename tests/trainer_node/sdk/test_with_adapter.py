"""A whole model with a LoRA adapter beside it, as one state: a training loop's, and folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from trainer_node import Publisher
from trainer_node.sdk.adapters import Adapters
from trainer_node.sdk.tensors import ExpectedTensors, LiveTensor, fit

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LAYER = "model.layers.0.self_attn.q_proj"
PAIR = {
    f"base_model.model.{LAYER}.lora_A.weight": torch.arange(256).reshape(4, 64) / 64,
    f"base_model.model.{LAYER}.lora_B.weight": torch.zeros(64, 4),
}
PHI = {f"phi/{name}": tensor for name, tensor in PAIR.items()}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{LAYER}.weight": torch.randn(64, 64, generator=draw).bfloat16(),
        "model.norm.weight": torch.ones(64).bfloat16(),
    }


def in_peft(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model and two adapters under PEFT's names."""
    found = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    found[f"base_model.model.{LAYER}.base_layer.weight"] = found.pop(f"base_model.model.{LAYER}.weight")
    for adapter in ("phi", "default"):
        found |= {name.replace(".weight", f".{adapter}.weight"): tensor for name, tensor in PAIR.items()}
    return found


def save_state(folder: Path, tensors: dict[str, torch.Tensor], pair: dict[str, torch.Tensor]) -> None:
    """As a trainer saves a checkpoint with the adapter in a subfolder."""
    (folder / "phi").mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    save_file(pair, folder / "phi" / "adapter_model.safetensors")
    (folder / "phi" / "adapter_config.json").write_text(json.dumps(CONFIG))


def selected(tensors: dict[str, torch.Tensor], chosen: Any = None) -> list[str]:
    adapters = Adapters(chosen or {"phi": CONFIG}, beside=True)
    return sorted(one.name for one in adapters.select(LiveTensor(name, tensor) for name, tensor in tensors.items()))


def test_a_loop_publishes_both_from_a_base_without_the_adapter(run: Any, states: Any, tmp_path: Path) -> None:
    """Then a restarted trainer continues the run by streamed tensors, and resumes it."""
    base = tmp_path / "base"
    base.mkdir()
    save_file(model(), base / "model.safetensors")
    (base / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    run.hub_up(tmp_path / "checkpoints")
    run.peer_up("peer")
    options: Any = {"token_file": run.token, "base": base, "with_adapter": {"phi": CONFIG}, "dtype": torch.float32}
    with Publisher(run.address, **options) as publisher:
        assert publisher.beside == ()
        publisher.publish(0, in_peft(model(1)).items()).wait_live(1.0)
        assert states.differing(run.installed(0), model(1) | PHI) == []
        later = {name: tensor + 1 for name, tensor in PHI.items()}
        publisher.publish(1, iter((model(1) | later).items()), streamed=True).wait_live(1.0)
    assert states.differing(run.installed(1), model(1) | later) == []
    folder = run.out() / "step_1"
    assert json.loads((folder / "phi" / "adapter_config.json").read_text())["r"] == 4
    assert (folder / "config.json").exists()
    with pytest.raises(UsageError, match=r"rank 2 here and 4 in the hub's newest version 0\.1, .*: set rank 4"):
        Publisher(run.address, **options | {"with_adapter": {"phi": CONFIG | {"r": 2}}})
    with Publisher(run.address, **options) as publisher:
        assert publisher.beside == ("phi",)
        publisher.publish(2, iter((model(2) | PHI).items()), streamed=True).wait_live(1.0)
        assert states.differing(run.installed(2), model(2) | PHI) == []
        handle = publisher.resume(3, model(3) | PHI)
        handle.wait_live(1.0)
    assert handle.version.branch == 1
    with pytest.raises(UsageError, match="unexpected"), Publisher(run.address, token_file=run.token) as publisher:
        publisher.publish(4, {**model(4), **PHI, "more": torch.ones(3)})


@pytest.mark.prove  # the folder's form is tested below, publishing of folders elsewhere
def test_folders_with_the_adapter_in_a_subfolder_are_published(run: Any, states: Any, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    save_state(checkpoints / "step_0", model(), PAIR)
    (checkpoints / "step_0" / "STABLE").touch()
    run.hub_up(checkpoints)
    run.peer_up("peer")
    assert states.differing(run.installed(0), model() | PHI) == []
    options: Any = {"base": checkpoints / "step_0", "with_adapter": {"phi": CONFIG}}
    with Publisher(run.address, token_file=run.token, **options) as publisher:
        handle = publisher.publish(1, in_peft(model()).items())
        handle.wait_live(1.0)
    assert handle.durable.changed == 0, "the base has the adapter, so nothing is new"


def test_a_folder_with_an_adapter_beside_the_model_holds_both(tmp_path: Path) -> None:
    save_state(tmp_path / "a", model(), PAIR)
    found = Checkpoint.open(tmp_path / "a")
    assert {t.name for t in found.layout().tensors} == model().keys() | PHI.keys()
    assert found.small_files().keys() == {"phi/adapter_config.json"}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    save_file(load_file(tmp_path / "b" / "model.safetensors") | PHI, tmp_path / "b" / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"is in model\.safetensors and in adapter_model\.safetensors"):
        Checkpoint.open(tmp_path / "b")
    (tmp_path / "a" / "phi").rename(tmp_path / "a" / "p i")
    with pytest.raises(LocalError, match="is no name of an adapter"):
        Checkpoint.open(tmp_path / "a")


def test_names_of_the_model_and_of_peft_are_the_same_state() -> None:
    assert selected(in_peft(model())) == selected(model() | PHI) == selected(model() | PAIR) == sorted(model() | PHI)


@pytest.mark.parametrize(
    ("tensors", "chosen", "message"),
    [
        (model(), None, "no tensor belongs to adapter phi"),
        (model() | dict([*PHI.items()][:1]), None, "without its other matrix, .*lora_B.weight"),
        (model() | PHI, {"phi": CONFIG | {"r": 8}}, "says r=8"),
        (model() | PHI | {"phi/x.weight": torch.ones(1)}, None, "is no matrix of it"),
        (model(), 5, "with_adapter=int: give a PEFT model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: Any, chosen: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        selected(tensors, chosen)


def test_a_base_without_the_adapter_decides_the_rest() -> None:
    def live(*tables: dict[str, torch.Tensor]) -> list[LiveTensor]:
        return [LiveTensor(name, tensor) for table in tables for name, tensor in table.items()]

    def table(*tables: dict[str, torch.Tensor]) -> ExpectedTensors:
        return ExpectedTensors.of("the base", [t for _, t in fit(live(*tables), [], torch.float16)], {"phi"})

    found = fit(live(model(), PHI), [table(model())], torch.float32)
    assert {t.name: t.dtype for _, t in found} == dict.fromkeys(model(), "F16") | dict.fromkeys(PHI, "F32")
    with pytest.raises(UsageError, match="unexpected: other/"):
        fit(live(model(), {"other/a.lora_A.weight": torch.rand(2, 2)}), [table(model())], torch.float32)
    for tensors in (model(), model() | dict([*PHI.items()][:1])):
        with pytest.raises(UsageError, match="missing: phi/"):
            fit(live(tensors), [table(model(), PHI)], torch.float32)


def test_adapters_are_published_alone_or_beside_a_model() -> None:
    with pytest.raises(UsageError, match="give one"):
        Publisher("127.0.0.1:1", token_file="/nonexistent", adapter={"a": CONFIG}, with_adapter={"a": CONFIG})
