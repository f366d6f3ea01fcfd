"""Models whose folders hold other tensors than transformers computes with: experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground.errors import LocalError, UsageError
from tests.trainer_node.learning.expert_models import experts_folder, mixtral, qwen3_moe
from tests.trainer_node.sdk.conftest import Run
from trainer_node import Publisher
from trainer_node.learning import stored_tensors
from trainer_node.learning.exports import Exports
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.stored_tensors import RowBlock, check, dtypes
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks

ALONE = TrainerRanks(0, 1, torch.device("cpu"))


def step(model: LearnerModel, weights: TrainedWeights) -> None:
    ids = torch.arange(3, 19)[None]
    logprobs = model.module(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    (-logprobs.gather(1, ids[0, 1:, None]).mean()).backward()
    weights.collect_gradients()
    weights.update(0)


@pytest.fixture(params=[qwen3_moe, mixtral])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return experts_folder(tmp_path / "model", request.param)


@pytest.mark.parametrize("compute", ["published", "float32"])
def test_published_experts_have_names_and_words_of_the_folder(folder: Path, compute: Any) -> None:
    model = LearnerModel(folder, ALONE, compute=compute)
    held = load_file(folder / "model.safetensors")
    stored = dict(model.working_copy())
    assert stored.keys() == held.keys()
    assert len(model.parameters) < len(stored)
    for name, words in held.items():
        assert torch.equal(stored[name].detach().to(words.dtype), words), name
        assert model.stored_dtypes[name] == words.dtype


def test_exported_experts_load_as_the_trained_model(folder: Path, tmp_path: Path) -> None:
    model = LearnerModel(folder, ALONE, compute="float32")
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions(lr=1e-2))
    before = {name: tensor.detach().clone() for name, tensor in model.working_copy()}
    step(model, weights)
    changed = [name for name, tensor in model.working_copy() if not torch.equal(tensor.detach(), before[name])]
    assert any(".experts." in name for name in changed)
    exported = Exports(tmp_path / "exports", model, ALONE, every=1, keep=2).write(1, 1).folder
    assert load_file(exported / "model.safetensors").keys() == before.keys()
    fresh = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, model.parameters[name]), name


def test_folder_without_an_expert_is_refused(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    missing = next(name for name in held if ".experts.3." in name)
    save_file({name: words for name, words in held.items() if name != missing}, folder / "model.safetensors")
    with pytest.raises(LocalError, match="transformers cannot load"):
        LearnerModel(folder, ALONE)


def test_model_whose_words_are_not_the_folders_is_refused(folder: Path) -> None:
    model, held = LearnerModel(folder, ALONE), Checkpoint.open(folder)
    name, words = next((name, words) for name, words in model.working_copy() if ".experts." in name)
    check(held, {name: words})
    words[0, 0] += 1
    with pytest.raises(UsageError, match=f"{name} has other words"):
        check(held, {name: words})


def test_peer_installs_trained_experts_bit_for_bit(run: Run, folder: Path) -> None:
    run.hub_up(folder)
    run.peer_up("peer")
    model = LearnerModel(folder, ALONE, compute="float32")
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions(lr=1e-2))
    with Publisher(run.address, token_file=run.token, base=folder, plaintext=True) as publisher:
        for number in (1, 2):
            step(model, weights)
            publisher.publish(number, model.working_copy()).wait_durable()
            installed = run.installed(number)
            assert installed.keys() == load_file(folder / "model.safetensors").keys()
            for name, words in model.working_copy():
                assert torch.equal(installed[name], words.detach().to(model.stored_dtypes[name])), name


@pytest.mark.parametrize("rows", [[(0, 2)], [(0, 2), (3, 1)], [(0, 2), (1, 3)], [(1, 3)], []])
def test_parameter_of_which_the_folder_lacks_rows_is_refused(
    rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter of four rows, of which a later transformers might save a part alone, or a row twice."""
    module = torch.nn.Linear(3, 4, bias=False)

    def saved(_: object, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (numbered,) = numbers.values()
        return {f"part{first}": numbered[first : first + count] for first, count in rows}

    monkeypatch.setattr(stored_tensors, "_saved", saved)
    with pytest.raises(UsageError, match=r"'weight'.* rows once: such a model cannot be published"):
        stored_tensors.blocks(module, [f"part{first}" for first, _ in rows])


def test_parameter_of_several_published_dtypes_is_refused() -> None:
    parts = {name: RowBlock("p", first, 1, (1, 2)) for first, name in enumerate("ab")}
    assert dtypes(parts, {"a": torch.float32, "b": torch.float32}) == {"p": torch.float32}
    with pytest.raises(UsageError, match=r"b is torch.bfloat16, and other parts of 'p' are torch.float32"):
        dtypes(parts, {"a": torch.float32, "b": torch.bfloat16})
