"""A learner in one process, with a ledger and a hub in memory: batches are functions of their step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from netem.fleet.small_model import SmallModel, write_small_model
from netem.rollouts.own_sampler import batch_of, sampled_groups
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Finished, RolloutBatch, Wait
from p2pcast.tasks.task_loader import load_task
from tests.support.tensor_device import DEVICE
from trainer_node.learning.exports import Exports
from trainer_node.learning.learner import Cadence, Learner
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import rows_of
from trainer_node.learning.publications import Publications, VersionPublisher
from trainer_node.learning.trained_weights import Masters, OptimizerOptions, TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.hub_connection import VersionDurable
from trainer_node.sdk.publication_handle import Handle

TASK = "tests.daemons.rollouts.parity_task:Parity"
STEPS, EVERY = 5, 2


class KilledError(Exception):
    """The learner died here."""


ALONE = TrainerRanks(0, 1, DEVICE)


def small_folder(folder: Path, **changes: Any) -> Path:
    form = SmallModel(load_task(TASK).vocabulary, **{"hidden": 64, "layers": 1} | changes)
    return write_small_model(folder / "model", form, seed=1)


def batches(folder: Path) -> list[RolloutBatch]:
    """One batch for each step, sampled by the first weights."""
    model = LearnerModel(folder, ALONE).module
    task, made = load_task(TASK), []
    for step in range(STEPS):
        prompts = list(islice(task.jobs(step), 4))
        made.append(batch_of(sampled_groups(model, task, prompts, size=4, seed=step), step))
    return made


@dataclass
class MemoryLedger:
    """Keeps the promises of the real one to a learner. ``lineage``: ids of applied batches on the live lineage."""

    batches: Sequence[RolloutBatch]
    epoch: int = 0
    branch: int = 0
    lineage: list[bytes] = field(default_factory=list)
    trained: set[bytes] = field(default_factory=set)
    waits: int = 0

    def resume(
        self,
        branch: int,
        step: int,
        checkpoint: bytes | None = None,
        batches: Sequence[bytes] = (),
        *,
        from_start: bool = False,
    ) -> int:
        assert branch > self.branch or self.epoch == 0, "each resume has a branch of its own"
        assert [self.batches[step - len(batches) + n].id for n in range(len(batches))] == list(batches)
        assert step - len(batches) <= len([one for one in self.lineage if one in self.trained])
        self.trained |= set(batches)
        self.lineage = [batch.id for batch in self.batches[:step]]
        assert set(self.lineage) <= self.trained
        self.trained &= set(self.lineage)
        self.epoch, self.branch = self.epoch + 1, branch
        return self.epoch

    def poll(self, step: int) -> RolloutBatch | Finished | Wait:
        assert step == len(self.lineage)
        if self.waits:
            self.waits -= 1
            return Wait(0.0)
        return Finished() if step == len(self.batches) else self.batches[step]

    def applied(self, batch: RolloutBatch, step: int) -> None:
        assert batch.id not in self.lineage, "a batch is applied once in a lineage"
        assert step == len(self.lineage) + 1
        self.lineage.append(batch.id)

    def ack(self, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None:
        assert set(batches) <= set(self.lineage)
        self.trained |= set(batches)


@dataclass
class MemoryHub:
    """Stores every version at once. ``fails``: publications that are aborted and use their number up."""

    branch: int = 0
    versions: dict[Version, dict[str, torch.Tensor]] = field(default_factory=dict)
    fails: int = 0

    def publish(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        from p2pcast.ground.errors import RetryableError

        handle = Handle(step)
        handle.taken()
        handle.version = version = Version(self.branch, step)
        if self.fails:
            self.fails -= 1
            self.branch += 1
            handle.finish(RetryableError("the hub was lost"))
            return handle
        assert version not in self.versions, "a version is one thing for ever"
        self.versions[version] = {name: whole(tensor) for name, tensor in named_tensors}
        handle.durable = VersionDurable(version, 1, 1, 1)
        handle.finish()
        return handle

    def resume(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        self.branch += 1
        return self.publish(step, named_tensors, files=files)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, gathered from all ranks."""
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).to("cpu", copy=True)


class Lines:
    def __init__(self) -> None:
        self.lines: list[Mapping[str, object]] = []

    def write(self, document: Mapping[str, object]) -> object:
        self.lines.append(document)
        return None


class NoLive(Publications):
    """The hub in memory has no engines to wait for."""

    def _watch(self, handle: Handle, began_s: float) -> None:
        return


def learner(
    folder: Path,
    model_folder: Path,
    ledger: MemoryLedger | None,
    hub: VersionPublisher,
    *,
    masters: Masters = "fp32",
    every: int = 1,
    ranks: TrainerRanks = ALONE,
    export_every: int = 0,
) -> Learner:
    """As a new process would make it."""
    model = LearnerModel(model_folder, ranks)
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions(lr=1e-3, masters=masters))
    vocabulary = model.vocabulary
    return Learner(
        ledger=ledger,
        step_of=LearnerStep(model, weights, StepOptions(LossOptions(), 512), ranks),
        weights=weights,
        publications=NoLive(hub, model.working_copy, every, live_share=0.9, live_limit_s=1.0),
        ranks=ranks,
        folder=folder,
        cadence=Cadence(EVERY, 2),
        config={},
        rows=lambda batch, step: rows_of(
            batch, kind="grpo", eps=1e-4, overlong="keep", step=step, staleness=STEPS, vocabulary=vocabulary
        ),
        log=Lines(),
        exports=Exports(folder / "exports", model, ranks, every=export_every, keep=2) if export_every else None,
    )


def death_at(number: int) -> Callable[[str], None]:
    """Kills at the ``number``-th boundary from now."""
    left: Iterator[int] = iter(range(number, -1, -1))

    def watcher(boundary: str) -> None:
        if next(left) == 0:
            raise KilledError(boundary)

    return watcher
