"""Exported folders hold the published words, and transformers loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from netem.fleet.small_model import SmallModel, write_small_model
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RolloutBatch
from p2pcast.tasks.task_loader import load_task
from tests.trainer_node.learning.learner_stage import (
    ALONE,
    EVERY,
    STEPS,
    TASK,
    KilledError,
    MemoryHub,
    MemoryLedger,
    batches,
    learner,
)
from trainer_node.learning.exports import GENERATION, Exports
from trainer_node.learning.learner import HOOK
from trainer_node.learning.learner_model import LearnerModel

pytestmark = pytest.mark.device

Played = tuple[Path, list[RolloutBatch]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def played(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Played:
    form = SmallModel(load_task(TASK).vocabulary, hidden=64, layers=1, tied=request.param == "bfloat16")
    folder = write_small_model(tmp_path_factory.mktemp("model") / "model", form, seed=1, dtype=request.param)
    return folder, batches(folder)


def test_transformers_loads_the_words_that_were_published(tmp_path: Path, played: Played) -> None:
    model_folder, given = played
    (model_folder / GENERATION).unlink(missing_ok=True)
    hub = MemoryHub()
    run = learner(tmp_path, model_folder, MemoryLedger(given), hub, export_every=2)
    run.run()
    folders = sorted((tmp_path / "exports").iterdir())
    assert [folder.name for folder in folders] == ["000001-000000004", f"000001-{STEPS:09d}"], (
        "the newest, and the end's"
    )
    for folder, step in zip(folders, (4, STEPS), strict=True):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        words, published = dict(loaded.named_parameters()), hub.versions[Version(1, step)]
        assert words.keys() == published.keys()
        for name, tensor in published.items():
            assert words[name].dtype == tensor.dtype
            assert torch.equal(words[name].detach().view(torch.uint8), tensor.view(torch.uint8)), name
        ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)("w3 w1", return_tensors="pt").input_ids
        assert ids.tolist() == [[3, 1]]
        answer = loaded.generate(ids, max_new_tokens=3, do_sample=False)
        assert answer.shape[1] > 2
        assert GenerationConfig.from_pretrained(folder).eos_token_id == loaded.config.eos_token_id
    logged = [line for line in run.log.lines if line["event"] == "export"]  # type: ignore[attr-defined]
    assert [(line["step"], line["folder"]) for line in logged[1:]] == [(4, str(folders[0])), (STEPS, str(folders[1]))]


def test_the_next_learner_makes_an_export_that_a_death_prevented(tmp_path: Path, played: Played) -> None:
    model_folder, given = played
    hub, ledger = MemoryHub(), MemoryLedger(given)
    written: list[str] = []

    def dies(boundary: str) -> None:
        written.extend([boundary] if boundary == "written" else [])
        if len(written) == 2:  # the first checkpoint is of the start
            raise KilledError(boundary)

    with pytest.raises(KilledError), HOOK.by(dies):
        learner(tmp_path, model_folder, ledger, hub, export_every=EVERY).run()
    assert not (tmp_path / "exports").exists()
    again = learner(tmp_path, model_folder, ledger, hub, export_every=EVERY)
    again.run()
    logged = [line["step"] for line in again.log.lines if line["event"] == "export"]  # type: ignore[attr-defined]
    assert logged[0] == EVERY
    assert logged.count(EVERY) == 1
    third = learner(tmp_path, model_folder, ledger, hub, export_every=STEPS)
    assert third.exports is not None
    assert not third.exports.owed(STEPS)


def test_words_computed_in_float32_are_exported_as_published(tmp_path: Path, played: Played) -> None:
    model = LearnerModel(played[0], ALONE, compute="float32")
    written = Exports(tmp_path, model, ALONE, every=1, keep=1).write(1, 7)
    exported, stored = (folder / "model.safetensors" for folder in (written.folder, played[0]))
    words, expected = load_file(exported), load_file(stored)
    assert words.keys() == expected.keys()
    assert all(torch.equal(words[name], expected[name]) for name in words)
    assert {tensor.dtype for tensor in words.values()} == {tensor.dtype for tensor in expected.values()}


def test_unfinished_and_old_exports_are_removed(tmp_path: Path, played: Played) -> None:
    (tmp_path / ".000001-000000001.part-0123456789ab").mkdir()
    exports = Exports(tmp_path, LearnerModel(played[0], ALONE), ALONE, every=3, keep=2)
    for step in (1, 2, 3, 3):
        exports.write(1, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-000000002", "000001-000000003"]
    assert [step for step in range(1, 8) if exports.due(step)] == [6], "step 3 is exported already"
    assert exports.due(7, last=True)


def test_failure_leaves_no_folder(tmp_path: Path, played: Played) -> None:
    (tmp_path / "exports").write_text("")
    with pytest.raises(LocalError, match="exports"):
        Exports(tmp_path / "exports", LearnerModel(played[0], ALONE), ALONE, every=1, keep=1).write(1, 1)
    assert (tmp_path / "exports").read_text() == ""
