"""The learner: takes batches of rollouts from the ledger, trains, publishes versions, and keeps checkpoints.

    resume → ( take → judge → train → distil → applied → publish every κ steps → checkpoint every N steps → ack )

until the run ends. Runs with sparse attention judge the sampled tokens, and may train an adapter for rollouts.

Guarantees:

- Each batch is applied at most once in the lineage of any checkpoint that survives, whatever is killed when.
- The learner trains on no rollout that the ledger would not accept.
- Workers roll out on the last version while the next one is trained, encoded and sent.
- A learner that another one has replaced ends, and harms neither.

Each start of a learner is an epoch at the ledger and a branch at the hub: versions that the process before published
after its last checkpoint are left behind. The hub may later name a version of another branch, because an earlier
attempt had used the number. Then the learner writes a checkpoint, and tells the ledger of the fork before it takes
another batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import UsageError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.step_hook import StepHook
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Finished, RolloutBatch, Wait
from trainer_node.learning import checkpoints
from trainer_node.learning.checkpoints import CheckpointPosition, StoredCheckpoint
from trainer_node.learning.distillation.sparse_distillation import SparseDistillation
from trainer_node.learning.exports import Exports
from trainer_node.learning.learner_step import LearnerStep, StepReport
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.publications import RETRY_MOST_S, RETRY_S, Publications
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks

logger = logging.getLogger("p2pcast.learner")

SHARED_WAIT_S: Final = 60.0
"""Interval in seconds at which the other ranks hear of a wait: well below the limit of a collective call."""
LIVE_END_S: Final = 30.0
"""Time in seconds that a learner at its end waits for engines to serve the last version."""

HOOK: StepHook[Callable[[str], None]] = StepHook()
"""Called at the learner's boundaries, with their names: for tests that kill it there."""


class BatchLedger(Protocol):
    """``p2pcast.ledger_api.batch_client.BatchClient``."""

    def resume(
        self,
        branch: int,
        step: int,
        checkpoint: bytes | None = None,
        batches: Sequence[bytes] = (),
        *,
        from_start: bool = False,
    ) -> int: ...
    def poll(self, step: int) -> RolloutBatch | Finished | Wait: ...
    def applied(self, batch: RolloutBatch, step: int) -> None: ...
    def ack(self, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None: ...


class Kept(Protocol):
    """A part of a learner whose state checkpoints hold beside the weights, under names that no other part uses.
    ``restore``: from all tensors of a checkpoint, which may hold none of this part's.
    """

    def state(self) -> dict[str, torch.Tensor]: ...
    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...


class EventLog(Protocol):
    """``trainer_node.learning.monitoring.run_log.RunLog``."""

    def write(self, document: Mapping[str, object]) -> object: ...


class Evaluating(Protocol):
    """``trainer_node.learning.evaluation.Evaluator``."""

    @property
    def busy(self) -> bool:
        """Whether the next publication has to wait."""

    def published(self, version: Version, step: int) -> None:
        """Engines may serve this version, which is of this step."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """``checkpoint_every``: learner steps; ``keep``: checkpoints kept."""

    checkpoint_every: int
    keep: int


@dataclass(slots=True)
class Learner:
    """All ranks run one. ``ledger``: on the first rank. ``rows``: a batch's rows at a step; raises IntegrityError for
    a rollout that must not be trained on. ``doing``: told of the present activity. ``evaluation``: on the first rank.
    """

    ledger: BatchLedger | None
    step_of: LearnerStep
    weights: TrainedWeights
    publications: Publications
    ranks: TrainerRanks
    folder: Path
    cadence: Cadence
    config: Mapping[str, Any]
    rows: Callable[[RolloutBatch, int], list[TrainingRow]]
    log: EventLog
    doing: Callable[[str], None] = lambda activity: None
    evaluation: Evaluating | None = None
    probe: Callable[[int, int], None] = lambda step, branch: None
    """Called on all ranks with the step whose words are being published, and the branch, before the words change."""
    judge: Callable[[Sequence[TrainingRow]], tuple[dict[str, Any], list[dict[str, Any]]]] = lambda rows: ({}, [])
    """Called on all ranks with the rows of a step, before it: figures for the event ``step``, and the values of events
    ``budget``.
    """
    kept: Sequence[Kept] = ()
    exports: Exports | None = None
    distillation: SparseDistillation | None = None
    """Trains the adapter of rollouts after each step of the policy."""
    about: Mapping[str, object] = field(default_factory=dict)
    """Facts of the event ``start``."""
    from_start: bool = False
    """Begin even where that undoes the run."""
    stopping: bool = False
    """The learner ends after its step, with a checkpoint."""
    step: int = 0
    branch: int = 0
    epoch: int = 0
    _since: list[str] = field(default_factory=list)
    """Ids of the batches since the last checkpoint."""
    _stored: StoredCheckpoint | None = None
    """The newest checkpoint."""
    _waited_s: float = 0.0
    _trained_s: float = 0.0

    def run(self) -> None:
        """Train until the ledger reports that the run has ended. Raises P2PCastError."""
        self._restore()
        version = self.publications.open(self.step)
        self.probe(self.step, version.branch)
        _at("opened")
        self._resume(version.branch)
        self._announce(version)
        if self._stored is None:
            self._checkpoint()  # a warm start is made once
        elif self.exports is not None and self.exports.owed(self.step):
            self._export(self.exports)
        while (taken := self._next()) is not None:
            batch, rows, wait_s = taken
            began_s = time.monotonic()
            self.doing("training")
            judged = self._judged(rows)
            report = self.step_of.train(rows, self.step, self.publications.wait_snapshot)
            distilled = self._distilled(rows)
            _at("trained")
            self.step += 1
            self._applied(batch)
            train_s = time.monotonic() - began_s
            self._publish_if_due()
            self._record_step(batch, rows, report, judged | distilled, wait_s, train_s)
            if self.step % self.cadence.checkpoint_every == 0:
                self._checkpoint()
            self._export_if_due()
        self._end()

    def stop(self) -> None:
        """Stop after this step. Safe to call from a signal handler."""
        self.stopping = True

    # -- beginning

    def _restore(self) -> None:
        stored = self._stored = checkpoints.newest(self.folder)
        if stored is not None:
            state = checkpoints.read(stored, self.weights.expected, self.ranks)
            for part in (self.weights, *self.kept):
                part.restore(state)
            self.step = stored.position.step
            logger.info("continuing from %s, step %d", stored.folder, self.step)

    def _resume(self, branch: int) -> None:
        stored = self._stored
        digest = None if stored is None else stored.digest
        batches = [] if stored is None else checkpoints.batches_of(stored.position)
        epoch = 0
        if self.ledger is not None:
            epoch = self.ledger.resume(branch, self.step, digest, batches, from_start=self.from_start)
        self.epoch, self.branch = self.ranks.share(epoch), branch
        self._since = []
        self._log("start", branch=branch, epoch=self.epoch, step=self.step, config=dict(self.config), **self.about)
        _at("resumed")

    # -- a batch

    def _next(self) -> tuple[RolloutBatch | None, list[TrainingRow], float] | None:
        """The next batch and its rows; None at the end of the run. Only the first rank has the batch itself."""
        began_s = time.monotonic()
        self.doing("waiting for a batch")
        while True:
            self._follow_branch()
            found = self._asked()
            rows = self.rows(found, self.step) if isinstance(found, RolloutBatch) else None
            over = self.stopping or isinstance(found, Finished)
            kind = self.ranks.share("end" if over else "wait" if rows is None else "batch")
            if kind == "end":
                return None
            if kind == "batch":
                _at("taken")
                wait_s = time.monotonic() - began_s
                batch = found if isinstance(found, RolloutBatch) else None
                return batch, self.ranks.share(rows) or [], wait_s
            self._publish_if_due()

    def _asked(self) -> RolloutBatch | Finished | Wait | None:
        """The ledger's answer on the first rank: a batch, the end, or a wait that another part of the loop can end."""
        if self.ledger is None:
            return None
        until_s = time.monotonic() + SHARED_WAIT_S
        while isinstance(found := self.ledger.poll(self.step), Wait):
            if self.stopping or self._must_publish() or self._left_branch() or time.monotonic() > until_s:
                break
            time.sleep(found.wait_s)
            self._observe()
        return found

    def _distilled(self, rows: Sequence[TrainingRow]) -> dict[str, Any]:
        if self.distillation is None:
            return {}
        self.doing("distilling")
        return self.distillation.train(rows, self.step, self.publications.wait_snapshot).document()

    def _must_publish(self) -> bool:
        """Whether only new weights, or another attempt to publish them, can end the wait."""
        return self.publications.due(self.step) and not (self.evaluation is not None and self.evaluation.busy)

    def _left_branch(self) -> bool:
        """The newest version is on another branch: the ledger accepts none of its rollouts before it knows the fork."""
        version = self.publications.stored
        return version is not None and version.branch != self.branch

    def _applied(self, batch: RolloutBatch | None) -> None:
        if self.ledger is not None and batch is not None:
            self.ledger.applied(batch, self.step)
            self._since.append(batch.id.hex())
        _at("applied")

    def _judged(self, rows: Sequence[TrainingRow]) -> dict[str, Any]:
        figures, changes = self.judge(rows)
        for change in changes:
            # Of the step that follows: a run that continues from this one decides again.
            self._log("budget", step=self.step + 1, **change)
        return figures

    # -- versions

    def _publish_if_due(self) -> None:
        self._observe()  # a version that became live meanwhile may begin an evaluation, which delays the next one
        if self.ranks.share(self._must_publish() if self.ranks.first else False):
            self._publish()
            _at("published")
            self._observe()

    def _publish(self) -> None:
        self.publications.begin(self.step)
        self.probe(self.step, self.branch)

    def _publish_last(self) -> None:
        """No later step repeats a publication that fails: the last one is repeated here until the hub stores it, or a
        signal comes.
        """
        delays = Backoff(RETRY_S, RETRY_MOST_S, uniform)
        self.publications.wait_durable()
        while self.ranks.share(not self.stopping and self.publications.unpublished(self.step)):
            self._publish()
            if self.publications.wait_durable() is None:
                time.sleep(delays.next_s())

    def _follow_branch(self) -> None:
        """If the hub has put the newest version on another branch, tell the ledger where the old one ended."""
        version = self.publications.stored
        branch = self.ranks.share(self.branch if version is None else version.branch)
        if branch == self.branch:
            return
        logger.warning("the hub continues on branch %d: a version of branch %d was not completed", branch, self.branch)
        if self._stored is None or self._stored.position.step != self.step:
            self._write()
        self._resume(branch)

    # -- checkpoints

    def _checkpoint(self) -> None:
        began_s = time.monotonic()
        stored = self._write()
        if self.ledger is not None:
            self.ledger.ack(self.step, checkpoints.batches_of(stored.position), stored.digest)
        _at("acknowledged")
        self._since = []
        if self.ranks.first:
            checkpoints.prune(self.folder, self.cadence.keep)
            seconds = round(time.monotonic() - began_s, 3)
            self._log("checkpoint", step=self.step, digest=stored.digest.hex(), bytes=stored.nbytes, seconds=seconds)

    def _write(self) -> StoredCheckpoint:
        position = self.ranks.share(CheckpointPosition(self.epoch, self.branch, self.step, tuple(self._since)))
        state = self.weights.state()
        for part in self.kept:
            state |= part.state()
        stored = checkpoints.write(self.folder, position, state, self.config, self.ranks)
        self._stored = stored
        _at("written")
        return stored

    def _export_if_due(self, *, last: bool = False) -> None:
        if self.exports is not None and self.exports.due(self.step, last=last):
            self._export(self.exports)

    def _export(self, exports: Exports) -> None:
        began_s = time.monotonic()
        written = exports.write(self.epoch, self.step)
        _at("exported")
        seconds = round(time.monotonic() - began_s, 3)
        self._log("export", step=self.step, folder=str(written.folder), bytes=written.nbytes, seconds=seconds)

    def _end(self) -> None:
        """The last step is in a checkpoint; published too, unless a signal has ended the learner."""
        self._publish_last()
        stopped = self.ranks.share(self.stopping)
        self._follow_branch()
        if self.ranks.share(len(self._since)):
            self._checkpoint()
        if not stopped:
            self._export_if_due(last=True)
            self.publications.join(LIVE_END_S)
        self._observe()
        spent_s = self._waited_s + self._trained_s
        self._log(
            "end", step=self.step, seconds=round(spent_s, 3), reason="a signal" if stopped else "the ledger's last step"
        )

    # -- what a person sees

    def _log(self, event: str, **values: object) -> None:
        if self.ranks.first:
            self.log.write({"event": event, **values})

    def _announce(self, version: Version) -> None:
        if self.ranks.first:
            logger.info("epoch %d: step %d as version %s", self.epoch, self.step, version)
            self._live(version, self.step)

    def _live(self, version: Version, step: int) -> None:
        if self.evaluation is not None:
            self.evaluation.published(version, step)

    def _observe(self) -> None:
        if not self.ranks.first:
            return
        for one in self.publications.finished():
            self._log(
                "publish",
                version=str(one.version),
                step=one.version.step,
                bytes=one.bytes,
                changed=one.changed,
                elements=one.elements,
                density=one.changed / max(1, one.elements),
                snapshot_s=round(one.snapshot_s, 4),
                durable_s=round(one.durable_s, 4),
                live_s=None if one.live_s is None else round(one.live_s, 4),
                engines=one.engines,
            )
            self._live(one.version, one.version.step)

    def _record_step(
        self,
        batch: RolloutBatch | None,
        rows: Sequence[TrainingRow],
        report: StepReport,
        figures: Mapping[str, Any],
        wait_s: float,
        train_s: float,
    ) -> None:
        self._waited_s += wait_s
        self._trained_s += train_s
        self._observe()
        if batch is None:
            return
        from trainer_node.learning.monitoring.step_record import step_record

        bubble = self._waited_s / max(1e-9, self._waited_s + self._trained_s)
        self._log(
            "step",
            step=self.step,
            branch=self.branch,
            epoch=self.epoch,
            batch=batch.id.hex(),
            wait_s=round(wait_s, 4),
            train_s=round(train_s, 4),
            bubble=round(bubble, 5),
            lr=self.weights.rate(self.step - 1),
            **step_record(batch, rows, report),
            **figures,
        )


def publish_every(stated: int, staleness: int) -> int:
    """κ: ``stated``, or max(1, S − 1) if that is 0 (ECHO-2, section 4.1). Raises UsageError above S + 1: no rollout of
    the last version would be fresh enough when the next one is published.
    """
    every = stated or max(1, staleness - 1)
    if every > staleness + 1:
        raise UsageError(
            f"[train] publish-every = {every}, and the ledger's staleness bound is {staleness}: at most {staleness + 1}"
            " steps may lie between two versions"
        )
    return every


def _at(boundary: str) -> None:
    if HOOK.watcher is not None:
        HOOK.watcher(boundary)
