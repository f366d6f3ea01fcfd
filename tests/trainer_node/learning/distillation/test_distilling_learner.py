"""A learner that trains the adapter of rollouts: its log, versions and checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcast.ground.errors import UsageError
from p2pcast.ledger_api.batch_client import RolloutBatch
from p2pcast.sparse.budget_guard import GuardOptions
from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from tests.trainer_node.learning.learner_stage import (
    ALONE,
    EVERY,
    STEPS,
    KilledError,
    MemoryHub,
    MemoryLedger,
    NoLive,
    batches,
    death_at,
    learner,
    small_folder,
)
from trainer_node.learning import checkpoints
from trainer_node.learning.distillation.distillation_startup import AdapterState, adapter_fault, published_words
from trainer_node.learning.distillation.rollout_adapter import NAME, RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.guarding.schedule_guard import ScheduleGuard
from trainer_node.learning.learner import HOOK, Learner
from trainer_node.learning.learner_config import DistillTable, LearnerConfig, ModelTable, SparseTable
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import NOT_SAMPLED
from trainer_node.learning.trained_weights import OptimizerOptions
from trainer_node.sdk.adapters import Adapters
from trainer_node.sdk.publisher import Publisher
from trainer_node.sdk.tensors import LiveTensor

SCHEDULE = BudgetSchedule((1,), 1, 1000)
"""Four tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def played(folder: Path) -> list[RolloutBatch]:
    return batches(folder)


def phi_of(model: LearnerModel, rank: int = 4) -> SparseDistillation:
    adapter = RolloutAdapter(model, rank=rank, alpha=16, options=OptimizerOptions(lr=1e-2))
    options = DistillOptions(LossOptions(), 512, kl_weight=1.0, page_tokens=1)
    return SparseDistillation(model, adapter, options, lambda version: SCHEDULE)


def distilling(place: Path, folder: Path, ledger: MemoryLedger, hub: MemoryHub, rank: int = 4) -> Learner:
    run = learner(place, folder, ledger, hub)
    model, rows = run.step_of._model, run.rows
    run.distillation = found = phi_of(model, rank)
    run.kept = [AdapterState(found.adapter.weights)]
    run.publications = NoLive(hub, lambda: published_words(model, found), 1, live_share=0.9, live_limit_s=1.0)
    run.rows = lambda batch, step: [replace(row, sparse=row.versions != NOT_SAMPLED) for row in rows(batch, step)]
    return run


def last(hub: MemoryHub) -> dict[str, torch.Tensor]:
    return hub.versions[max(hub.versions)]


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, phi: bool) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if name.startswith("phi/") == phi)


def test_versions_carry_both_and_the_policy_is_that_of_a_run_without_an_adapter(
    tmp_path: Path, folder: Path, played: list[RolloutBatch]
) -> None:
    plain, hub = MemoryHub(), MemoryHub()
    learner(tmp_path / "plain", folder, MemoryLedger(played), plain).run()
    run = distilling(tmp_path / "both", folder, MemoryLedger(played), hub)
    run.run()
    assert alike(last(plain), last(hub), phi=False)
    assert sum(name.startswith("phi/") for name in last(hub)) == 2 * 7 * 3
    first = hub.versions[min(hub.versions)]
    assert not alike(first, last(hub), phi=True)
    steps = [line for line in run.log.lines if line["event"] == "step"]  # type: ignore[attr-defined]
    assert len(steps) == STEPS
    for step in steps:
        assert step["kl_distill"] > 0
        assert 0 < step["acceptance_distill"] <= 1
        assert step["distill_shortened"] > 0


@pytest.mark.parametrize("number", [13, pytest.param(24, marks=pytest.mark.prove)])
def test_a_killed_run_continues_exactly_with_its_adapter(
    tmp_path: Path, folder: Path, played: list[RolloutBatch], number: int
) -> None:
    whole, hub, ledger = MemoryHub(), MemoryHub(), MemoryLedger(played)
    distilling(tmp_path / "whole", folder, MemoryLedger(played), whole).run()
    with pytest.raises(KilledError), HOOK.by(death_at(number)):
        distilling(tmp_path / "killed", folder, ledger, hub).run()
    distilling(tmp_path / "killed", folder, ledger, hub).run()
    assert alike(last(whole), last(hub), phi=False)
    assert alike(last(whole), last(hub), phi=True)


def test_checkpoints_of_other_runs_are_continued(
    tmp_path: Path, folder: Path, played: list[RolloutBatch], caplog: pytest.LogCaptureFixture
) -> None:
    """Without an adapter, then with one, with one of another rank, and without one again."""
    ledger, hub = MemoryLedger(played[:EVERY]), MemoryHub()
    learner(tmp_path, folder, ledger, hub).run()
    for rank in (4, 2):
        run = distilling(tmp_path, folder, ledger, hub, rank)
        run.run()
        assert run.step == EVERY
        assert "phi begins anew" in caplog.text
        assert all(not tensor.any() for name, tensor in last(hub).items() if name.endswith("lora_B.weight"))
        caplog.clear()
        run._checkpoint()
        assert "phi" in names_in(tmp_path)
    run = learner(tmp_path, folder, ledger, hub)
    run.kept = [AdapterState(None)]
    with caplog.at_level("WARNING"):
        run.run()
    assert "the adapter is left out" in caplog.text
    run._checkpoint()
    assert "phi" not in names_in(tmp_path)


def test_tensors_in_checkpoints_keep_their_names(tmp_path: Path, folder: Path, played: list[RolloutBatch]) -> None:
    run = distilling(tmp_path, folder, MemoryLedger(played[:EVERY]), MemoryHub())
    guard = ScheduleGuard(SCHEDULE, GuardOptions())
    run.kept = [guard, *run.kept]
    run.run()
    state = state_in(tmp_path)
    matrix = "model.layers.0.mlp.down_proj.lora_A.weight"
    assert {
        "weights.model.layers.0.mlp.down_proj.weight",
        "optimizer.exp_avg.model.layers.0.mlp.down_proj.weight",
        "optimizer.step.model.layers.0.mlp.down_proj.weight",
        f"phi/weights.{matrix}",
        f"phi/optimizer.exp_avg.{matrix}",
        f"phi/optimizer.step.{matrix}",
        "guard.schedules",
    } <= state.keys()
    assert names_in(tmp_path) == {"weights", "optimizer", "phi", "guard"}
    assert state["guard.schedules"].equal(guard.state()["guard.schedules"])


def state_in(place: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    stored = checkpoints.newest(place)
    assert stored is not None

    def rooms(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in entries.items()}

    return checkpoints.read(stored, rooms, ALONE)


def names_in(place: Path) -> set[str]:
    """First words of the names of tensors in the newest checkpoint."""
    return {re.split("[./]", name)[0] for name in state_in(place)}


def test_an_adapter_without_a_schedule_is_refused(tmp_path: Path) -> None:
    config = LearnerConfig(model=ModelTable(tmp_path), distill=DistillTable(rank=4))
    with pytest.raises(UsageError, match=r"needs \[sparse\] schedule"):
        config.checked()
    replace(config, sparse=SparseTable(tmp_path / FILE)).checked()


def test_a_run_keeps_the_adapter_of_its_versions() -> None:
    plain = LearnerConfig()
    assert adapter_fault(plain, ()) is None
    assert "lr = 0" in str(adapter_fault(plain, (NAME,)))
    assert adapter_fault(replace(plain, distill=DistillTable(rank=4)), (NAME,)) is None


@pytest.mark.prove  # the names are tested below
def test_a_real_hub_takes_versions_of_policy_and_adapter(run: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    run.hub_up(tmp_path / "checkpoints")
    run.peer_up("peer")
    distillation = phi_of(LearnerModel(folder, ALONE))
    model, adapter = distillation._model, distillation.adapter
    chosen = {NAME: adapter.configuration("base")}
    options: Any = {"token_file": run.token, "base": folder, "with_adapter": chosen, "dtype": adapter.dtype}
    with Publisher(run.address, **options) as publisher:
        publisher.publish(1, list(published_words(model, distillation))).wait_live(1.0)
        with torch.no_grad():
            for parameter in adapter.parameters.values():
                parameter += 0.5
        publisher.publish(2, list(published_words(model, distillation))).wait_live(1.0)
    found = run.installed(2)
    expected = dict(published_words(model, distillation))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((run.out() / "step_2" / NAME / "adapter_config.json").read_text())["r"] == 4
    with pytest.raises(UsageError, match="phi has rank 2 here and 4 in"):
        Publisher(run.address, **options | {"with_adapter": {NAME: phi_of(model, 2).adapter.configuration("base")}})
    with Publisher(run.address, token_file=run.token, base=folder) as publisher:
        assert adapter_fault(LearnerConfig(), publisher.beside) is not None


def test_the_publisher_knows_all_matrices_by_their_names(folder: Path) -> None:
    distillation = phi_of(LearnerModel(folder, ALONE))
    words = dict(published_words(distillation._model, distillation))
    adapters = Adapters({NAME: distillation.adapter.configuration("base")}, beside=True)
    found = adapters.select(LiveTensor(name, tensor) for name, tensor in words.items())
    assert sorted(one.name for one in found) == sorted(words)
