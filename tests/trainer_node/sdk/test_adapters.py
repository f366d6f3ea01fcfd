"""LoRA adapters as a run of their own: a training loop's, and folders that PEFT saves."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2pcast.ground.errors import UsageError
from trainer_node import Publisher
from trainer_node.sdk.adapters import Adapters
from trainer_node.sdk.tensors import LiveTensor

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": {"q_proj"}}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


class Config:
    """As PEFT's configuration object."""

    def to_dict(self) -> dict[str, Any]:
        return CONFIG | {"peft_type": "LORA"}


class PeftLike(torch.nn.Module):
    """Modules and names as PEFT makes them, with a base weight beside two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config = {"first": Config(), "second": Config()}
        draw = torch.Generator().manual_seed(0)
        self._tensors = {f"{LAYER}.base_layer.weight": torch.randn(64, 64, generator=draw)}
        for adapter in self.peft_config:
            self._tensors[f"{LAYER}.lora_A.{adapter}.weight"] = torch.randn(4, 64, generator=draw)
            self._tensors[f"{LAYER}.lora_B.{adapter}.weight"] = torch.randn(64, 4, generator=draw)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._tensors.items())

    def step(self) -> None:
        for tensor in self._tensors.values():
            tensor += 0.01


def selected(adapters: Adapters, tensors: dict[str, torch.Tensor]) -> list[str]:
    return [one.name for one in adapters.select(LiveTensor(name, tensor) for name, tensor in tensors.items())]


def test_a_loop_publishes_its_adapters_alone(run: Any, states: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    run.hub_up(tmp_path / "checkpoints")
    run.peer_up("peer")
    model = PeftLike()
    with Publisher(run.address, token_file=run.token, adapter=model) as publisher:
        for step in (1, 2):
            model.step()
            handle = publisher.publish(step, model.named_parameters())
            handle.wait_live(1.0)
    assert handle.durable.params == 4 * 4 * 64
    expected = {
        f"{adapter}/{LAYER}.lora_{part}.weight": model._tensors[f"{LAYER}.lora_{part}.{adapter}.weight"].bfloat16()
        for adapter in ("first", "second")
        for part in "AB"
    }
    assert states.differing(run.installed(2), expected) == []
    config = json.loads((run.out() / "step_2" / "second" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj"])


def test_a_restarted_trainer_publishes_its_new_configuration(run: Any, tmp_path: Path) -> None:
    """An engine scales by the configuration of the version, not by that of the run's first version."""
    (tmp_path / "checkpoints").mkdir()
    run.hub_up(tmp_path / "checkpoints")
    run.peer_up("peer")
    tensors = {f"{LAYER}.lora_A.weight": torch.ones(4, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 4)}
    for step, alpha in ((1, 8), (2, 16)):
        with Publisher(run.address, token_file=run.token, adapter={"a": CONFIG | {"lora_alpha": alpha}}) as publisher:
            publisher.publish(step, {n: t * step for n, t in tensors.items()}).wait_live(1.0)
        assert len(run.installed(step)) == 2
        config = json.loads((run.out() / f"step_{step}" / "a" / "adapter_config.json").read_text())
        assert config["lora_alpha"] == alpha


def test_folders_that_peft_saves_are_published(run: Any, states: Any, tmp_path: Path) -> None:
    """One adapter at the root of each folder; then the trainer's loop continues the run."""
    checkpoints = tmp_path / "checkpoints"
    tensors = {f"{LAYER}.lora_A.weight": torch.ones(4, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 4)}
    for step in (0, 1):
        folder = checkpoints / f".{step}"
        folder.mkdir(parents=True)
        save_file({n: t + step for n, t in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q_proj"]}))
        (folder / "STABLE").touch()
        if step == 0:
            folder.rename(checkpoints / "step_0")
            run.hub_up(checkpoints)
            run.peer_up("peer")
    (checkpoints / ".1").rename(checkpoints / "step_1")
    assert states.differing(run.installed(1), {n: t + 1 for n, t in tensors.items()}) == []
    assert (run.out() / "step_1" / "adapter_config.json").exists()
    with Publisher(run.address, token_file=run.token, adapter={"default": CONFIG}) as publisher:
        publisher.publish(2, tensors).wait_live(1.0)
    assert states.differing(run.installed(2), tensors) == []


def test_a_folder_of_several_adapters_names_each(tmp_path: Path) -> None:
    from p2pcast.checkpoint import Checkpoint
    from p2pcast.ground.errors import LocalError

    for adapter in ("one", "two"):
        (tmp_path / adapter).mkdir()
        save_file({f"{LAYER}.lora_A.weight": torch.ones(4, 64)}, tmp_path / adapter / "adapter_model.safetensors")
        (tmp_path / adapter / "adapter_config.json").write_text("{}")
    found = Checkpoint.open(tmp_path)
    assert [t.name for t in found.layout().tensors] == [f"{a}/{LAYER}.lora_A.weight" for a in ("one", "two")]
    assert found.small_files().keys() == {"one/adapter_config.json", "two/adapter_config.json"}
    shutil.copy(tmp_path / "one" / "adapter_model.safetensors", tmp_path)
    with pytest.raises(LocalError, match="move it"):
        Checkpoint.open(tmp_path)


def test_tensors_of_other_adapters_and_of_the_base_are_left_out() -> None:
    tensors = dict(PeftLike().named_parameters())
    assert selected(Adapters({"second": CONFIG}), tensors) == [f"second/{LAYER}.lora_{part}.weight" for part in "AB"]
    pair = {f"{LAYER}.lora_A.weight": torch.ones(4, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 4)}
    plain = pair | {"model.norm.weight": torch.ones(4)}
    assert selected(Adapters({"only": CONFIG}), plain) == [f"only/{name}" for name in pair]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (5, "give a PEFT model"),
        ({}, "give a PEFT model"),
        ({"a/b": CONFIG}, "is no name of an adapter"),
        ({"a": 5}, "is no configuration"),
        ({"a": {"r": 4}}, "lora_alpha, a number"),
        ({"a": CONFIG | {"lora_alpha": math.nan}}, "cannot be written as JSON"),
        ({"a": CONFIG | {"lora_alpha": math.inf}}, "cannot be written as JSON"),
        ({"a": CONFIG | {"use_dora": True}}, "DoRA's magnitudes"),
        ({"a": CONFIG | {"bias": "all"}}, "biases of the base model"),
        ({"a": CONFIG | {"modules_to_save": ["lm_head"]}}, "whole modules"),
    ],
)
def test_configurations_that_a_run_cannot_carry_are_refused(chosen: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Adapters(chosen)


def test_missing_adapters_and_wrong_ranks_are_named() -> None:
    with pytest.raises(UsageError, match="no tensor belongs to adapter other"):
        selected(Adapters({"other": CONFIG}), dict(PeftLike().named_parameters()))
    with pytest.raises(UsageError, match="says r=8"):
        selected(Adapters({"first": CONFIG | {"r": 8}}), dict(PeftLike().named_parameters()))
    with pytest.raises(UsageError, match="without its other matrix"):
        selected(Adapters({"first": CONFIG}), {f"{LAYER}.lora_B.first.weight": torch.ones(64, 4)})
