"""The learner's loop: killed anywhere, it applies each batch once in its lineage, and continues exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2pcast.ground.errors import IntegrityError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Finished, RolloutBatch, Wait
from tests.trainer_node.learning.learner_stage import (
    EVERY,
    STEPS,
    KilledError,
    MemoryHub,
    MemoryLedger,
    batches,
    death_at,
    learner,
    small_folder,
)
from trainer_node.learning import checkpoints
from trainer_node.learning.learner import HOOK, publish_every
from trainer_node.learning.publications import PublishedTimes
from trainer_node.sdk.hub_connection import VersionDurable
from trainer_node.sdk.publication_handle import Handle

pytestmark = pytest.mark.device

BOUNDARIES = 60
"""More than one undisturbed run has."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def played(model_folder: Path) -> list[RolloutBatch]:
    return batches(model_folder)


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, played: list[RolloutBatch]
) -> dict[str, torch.Tensor]:
    hub = MemoryHub()
    learner(tmp_path_factory.mktemp("whole"), model_folder, MemoryLedger(played), hub).run()
    return hub.versions[max(hub.versions)]


def test_run_publishes_and_acknowledges_every_step(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch]
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    run = learner(tmp_path, model_folder, ledger, hub)
    activities: list[str] = []
    run.doing = activities.append
    run.run()
    assert activities == ["waiting for a batch", "training"] * STEPS + ["waiting for a batch"]
    assert [version.step for version in sorted(hub.versions)] == list(range(STEPS + 1))
    assert ledger.lineage == [batch.id for batch in played] == [one for one in ledger.lineage if one in ledger.trained]
    events = [line["event"] for line in run.log.lines]  # type: ignore[attr-defined]
    assert events.count("step") == STEPS
    assert events.count("checkpoint") == 1 + STEPS // EVERY + STEPS % EVERY
    assert events[-1] == "end"


def test_new_budgets_belong_to_the_step_that_follows(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch]
) -> None:
    """A run that continues from the step before decides again, and its record leaves the earlier decision out."""
    run = learner(tmp_path, model_folder, MemoryLedger(played), MemoryHub())
    run.judge = lambda rows: ({}, [{"bin": 0}])
    run.run()
    lines = run.log.lines  # type: ignore[attr-defined]
    steps = {event: [line["step"] for line in lines if line["event"] == event] for event in ("budget", "step")}
    assert steps["budget"] == steps["step"] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n % 5 == 0 else pytest.mark.prove) for n in range(BOUNDARIES)]
)
def test_death_at_any_boundary_changes_no_weight(
    tmp_path: Path,
    model_folder: Path,
    played: list[RolloutBatch],
    undisturbed: dict[str, torch.Tensor],
    number: int,
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    try:
        with HOOK.by(death_at(number)):
            learner(tmp_path, model_folder, ledger, hub).run()
    except KilledError:
        with pytest.raises(KilledError), HOOK.by(death_at(number % 7)):  # again, soon after the restart
            learner(tmp_path, model_folder, ledger, hub).run()
        learner(tmp_path, model_folder, ledger, hub).run()
    assert ledger.lineage == [batch.id for batch in played]
    assert set(ledger.lineage) <= ledger.trained
    last = hub.versions[max(hub.versions)]
    assert max(hub.versions).step == STEPS
    assert all(torch.equal(last[name], undisturbed[name]) for name in undisturbed)


def test_failed_publication_forks_the_run_and_loses_no_batch(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch], undisturbed: dict[str, torch.Tensor]
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    run = learner(tmp_path, model_folder, ledger, hub)

    def fail_once(boundary: str) -> None:
        if boundary == "applied" and run.step == 3 and len(hub.versions) == 3:
            hub.fails = 1

    with HOOK.by(fail_once):
        run.run()
    branches = sorted({version.branch for version in hub.versions})
    assert len(branches) == 2
    assert ledger.branch == branches[-1]
    assert ledger.lineage == [batch.id for batch in played]
    last = hub.versions[max(hub.versions)]
    assert all(torch.equal(last[name], undisturbed[name]) for name in undisturbed)


def test_last_version_is_published_though_its_publication_fails(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch], undisturbed: dict[str, torch.Tensor]
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    run = learner(tmp_path, model_folder, ledger, hub)

    def fail_twice(boundary: str) -> None:
        if boundary == "applied" and run.step == STEPS:
            hub.fails = 2

    with HOOK.by(fail_twice):
        run.run()
    newest = max(hub.versions)
    assert newest == Version(ledger.branch, STEPS)
    assert all(torch.equal(hub.versions[newest][name], undisturbed[name]) for name in undisturbed)


@dataclass
class LateHub(MemoryHub):
    """Puts the version of ``late_step`` on another branch, and stores it when ``store_late`` is called."""

    late_step: int = 3
    late: Handle | None = None

    def publish(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        if step != self.late_step or self.late is not None:
            return super().publish(step, named_tensors, files=files)
        self.branch += 1
        stored = super().publish(step, named_tensors, files=files)
        self.late = Handle(step)
        self.late.taken()
        self.late.version = stored.version
        return self.late

    def store_late(self) -> None:
        if self.late is not None and self.late.durable is None:
            assert self.late.version is not None
            self.late.durable = VersionDurable(self.late.version, 1, 1, 1)
            self.late.finish()


def test_fork_that_is_known_during_a_wait_ends_the_wait(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, ledger = LateHub(), MemoryLedger(played)
    polls = Counter[int]()

    def poll(step: int) -> RolloutBatch | Finished | Wait:
        polls[step] += 1
        assert polls[step] < 100, "the learner does not tell the ledger of the fork"
        if step != hub.late_step or ledger.branch == hub.branch:
            return MemoryLedger.poll(ledger, step)
        hub.store_late()
        return Wait(0.0)

    monkeypatch.setattr(ledger, "poll", poll)
    learner(tmp_path, model_folder, ledger, hub).run()
    assert ledger.lineage == [batch.id for batch in played]
    assert max(hub.versions) == Version(ledger.branch, STEPS)


def test_versions_lie_kappa_steps_apart_and_the_last_step_is_published(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch]
) -> None:
    hub = MemoryHub()
    learner(tmp_path, model_folder, MemoryLedger(played), hub, every=3).run()
    assert [version.step for version in sorted(hub.versions)] == [0, 3, STEPS]


def test_a_live_version_is_reported_before_the_next_one_begins(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch]
) -> None:
    """Otherwise an evaluation of the live version could not delay the next one."""
    hub = MemoryHub()
    run = learner(tmp_path, model_folder, MemoryLedger(played), hub)
    order: list[tuple[str, int]] = []
    run.evaluation = SimpleNamespace(busy=False, published=lambda version, step: order.append(("live", step)))

    def watcher(boundary: str) -> None:
        if boundary == "trained":
            run.publications._done.put(PublishedTimes(max(hub.versions), 1, 1, 1, 0.0, 0.0, 0.0, 1))
        if boundary == "published":
            order.append(("begun", run.step))

    with HOOK.by(watcher):
        run.run()
    assert order[0] == ("live", 0)  # announced at the start
    assert order[1:] == [one for step in range(STEPS) for one in (("live", step), ("begun", step + 1))]


def test_learner_that_is_stopped_keeps_its_steps(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch], undisturbed: dict[str, torch.Tensor]
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    run = learner(tmp_path, model_folder, ledger, hub)

    def stop(boundary: str) -> None:
        run.stopping = run.stopping or (boundary == "applied" and run.step == 3)

    with HOOK.by(stop):
        run.run()
    assert len(ledger.lineage) == 3
    assert set(ledger.lineage) == ledger.trained
    learner(tmp_path, model_folder, ledger, hub).run()
    last = hub.versions[max(hub.versions)]
    assert all(torch.equal(last[name], undisturbed[name]) for name in undisturbed)


def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path, model_folder: Path, played: list[RolloutBatch]) -> None:
    learner(tmp_path, model_folder, MemoryLedger(played), MemoryHub()).run()
    stored = checkpoints.newest(tmp_path)
    assert stored is not None
    assert stored.position.step == STEPS
    victim = stored.folder / next(iter(stored.files))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(IntegrityError, match=victim.name):
        learner(tmp_path, model_folder, MemoryLedger(played, epoch=1, branch=0), MemoryHub()).run()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, model_folder: Path, played: list[RolloutBatch]) -> None:
    (tmp_path / ".000001-000000009.part-0123456789ab").mkdir()
    learner(tmp_path, model_folder, MemoryLedger(played), MemoryHub()).run()
    assert len(list(tmp_path.iterdir())) == 2


def test_kappa_is_at_most_one_above_the_staleness_bound() -> None:
    assert [publish_every(0, bound) for bound in (0, 1, 3, 6)] == [1, 1, 2, 5]
    assert publish_every(4, 3) == 4
    with pytest.raises(UsageError, match="at most 4"):
        publish_every(5, 3)


@dataclass
class ReplacedHub(MemoryHub):
    """From step 3 on, another learner's branch is the newest."""

    def publish(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        if step < 3:
            return super().publish(step, named_tensors, files=files)
        handle = Handle(step)
        handle.taken()
        handle.finish(RefusedError("branch 2 was opened after this trainer's branch 1"))
        return handle


def test_a_learner_that_another_has_replaced_ends(
    tmp_path: Path, model_folder: Path, played: list[RolloutBatch]
) -> None:
    hub = ReplacedHub()
    run = learner(tmp_path, model_folder, MemoryLedger(played), hub)
    with pytest.raises(RefusedError, match="branch 2 was opened"):
        run.run()
    assert max(hub.versions) == Version(1, 2)


def test_first_version_is_that_of_the_folder(tmp_path: Path, model_folder: Path, played: list[RolloutBatch]) -> None:
    hub = MemoryHub()
    run = learner(tmp_path, model_folder, MemoryLedger(played), hub)
    before = {name: tensor.detach().clone() for name, tensor in run.publications._weights()}
    run.run()
    assert all(torch.equal(before[name].cpu(), hub.versions[Version(1, 0)][name]) for name in before)
