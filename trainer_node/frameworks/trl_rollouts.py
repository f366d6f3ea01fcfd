"""A rollout worker of TRL whose samples come from a ledger: one batch of the ledger for each optimiser step.

    transfer = P2PCast("hub:7077", token_file="token", base="Qwen3-8B", first_step=0)
    rollouts = LedgerRollouts("http://127.0.0.1:7079", transfer, bearer_file="ledger/http.token", samples_a_step=256)
    AsyncGRPOTrainer(…, rollout_worker=rollouts, weight_transfer=transfer, callbacks=[rollouts.callback()]).train()

Guarantees: TRL trains on accepted results alone, with the ledger's rewards. The batch of step t is cut by the ledger's
rule for learner step t, and is trained in optimiser step t. Each batch is trained at most once on the way to any
checkpoint that survives: ``callback`` names a checkpoint's batches to the ledger, and a restart opens later batches
again.

TRL asks for the batch of step t + 1 before it trains step t. So the ledger hears one step early that a batch is
applied: when the batch after it is taken. A restart corrects that. Batches that are short of ``samples_a_step`` are
filled with copies without advantage, of which one token counts in TRL's mean over tokens.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from p2pcast.ground.errors import RetryableError, UsageError
from trainer_node.frameworks.ledger_steps import POSITION, LedgerSteps, ResumePosition, filled, filler

if TYPE_CHECKING:
    from p2pcast.ledger_api.batch_client import RolloutBatch
    from trainer_node.frameworks.trl_transfer import P2PCast
    from trainer_node.learning.objective.advantages import AdvantageKind
    from trainer_node.learning.objective.training_rows import TrainingRow

STOP_S: Final = 15.0
"""Time in seconds for the thread to end."""
logger = logging.getLogger("p2pcast.trl")


class LedgerRollouts:
    """``url``, ``bearer_file``, ``hub``, ``token_file``: as of ``BatchClient``. ``transfer``: of the same trainer; it
    needs ``first_step``, because ledger and learner count optimiser steps.

    ``samples_a_step``: per_device_train_batch_size × gradient_accumulation_steps × ranks, and at least the ledger's
    groups of a batch × samples of a group. ``advantages`` and ``eps``: as of ``group_advantages``. ``temperature``: of
    TRL's configuration.

    TRL's configuration needs ``max_steps``, ``token_budget=0``, ``max_staleness`` of 2 or more, and
    ``weight_sync_steps`` equal to ``transfer.steps_a_sync``. Raises UsageError.
    """

    def __init__(
        self,
        url: str,
        transfer: P2PCast,
        *,
        samples_a_step: int,
        bearer_file: str | os.PathLike[str] | None = None,
        hub: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        advantages: AdvantageKind = "grpo",
        eps: float = 1e-4,
        temperature: float = 1.0,
    ) -> None:
        if samples_a_step < 2:
            raise UsageError(f"samples_a_step={samples_a_step}: a batch has at least 2 samples")
        if transfer.first_step is None:
            raise UsageError("LedgerRollouts counts optimiser steps: give P2PCast first_step=0")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=samples_a_step)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._url, self._transfer, self._samples = url, transfer, samples_a_step
        self._options: dict[str, Any] = {"bearer_file": bearer_file, "hub": hub, "token_file": token_file}
        self._kind, self._eps, self._temperature = advantages, eps, temperature
        self._steps: LedgerSteps | None = None
        self._begins = ResumePosition()
        self._groups = 0
        """Number of groups so far, for TRL's ids."""
        self._changed = threading.Condition()
        """Guards the following."""
        self._model_version = 0
        self._answered_s = 0.0
        """Time of the ledger's last answer, by ``time.monotonic``."""
        self._ending = False
        self._finished_at: int | None = None
        """Learner step at which the ledger's run has ended."""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    # -- TRL's protocol, in its main thread

    def start(self) -> None:
        """After the first sync: tell the ledger where this run continues. Raises RefusedError, RetryableError and
        UsageError.
        """
        from p2pcast.ledger_api.batch_client import BatchClient

        version = self._transfer.version()
        if version is None:
            raise UsageError("the ledger needs the branch of the first sync: pass the same P2PCast as weight_transfer")
        client = BatchClient(self._url, **self._options)
        facts = client.facts()
        if self._transfer.steps_a_sync > facts.staleness + 1:
            raise UsageError(
                f"a sync every {self._transfer.steps_a_sync} steps starves a ledger with --staleness"
                f" {facts.staleness}: sync every {facts.staleness + 1} steps or more often"
            )
        self._steps = LedgerSteps(client)
        self._steps.begin(version.branch, self._begins)
        self._answered_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="p2pcast ledger batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        with self._changed:
            self._model_version = model_version
            self._changed.notify_all()

    def check_health(self, stale_after_s: float) -> None:
        """Raises the thread's error, and RetryableError for a silent ledger or a run that has ended."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._finished_at is not None:
                raise RetryableError(
                    f"the ledger's run has ended at step {self._finished_at}: give TRL no more max_steps"
                )
            silent_s = time.monotonic() - self._answered_s
        if silent_s > stale_after_s:
            raise RetryableError(f"the ledger at {self._url} has not answered for {silent_s:.0f} s")

    # -- checkpoints

    def callback(self) -> Any:
        """For ``callbacks`` of the trainer, on every rank: checkpoints name their batches, and restarts read them."""
        from trainer_node.frameworks.trl_checkpoints import LedgerCheckpoints

        return LedgerCheckpoints(self)

    def restore(self, folder: Path) -> None:
        """Before the first sync: the trainer has loaded this checkpoint. Raises UsageError."""
        try:
            self._begins = ResumePosition.read(folder / POSITION)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder} does not say which batches of the ledger it contains ({error}): resume from a checkpoint"
                f" with {POSITION}"
            ) from None
        self._transfer.first_step = self._begins.step

    def acknowledge(self, folder: Path, step: int) -> None:
        """The checkpoint in ``folder`` has ``step`` steps. Raises LocalError, RefusedError."""
        assert self._steps is not None
        self._steps.acknowledge(step, folder / POSITION)

    # -- in the thread

    def _run(self) -> None:
        try:
            self._hand_over()
        except Exception as error:  # noqa: BLE001 - check_health raises it in TRL's thread
            with self._changed:
                self._error = error

    def _hand_over(self) -> None:
        step, version = self._begins.step, 0
        rows: list[TrainingRow] = []
        while self._wanted(step) and (batch := self._taken(step)) is not None:
            with self._changed:
                version = self._model_version
            rows = self._rows_of(batch)
            self._put([self._sample(row, step, version) for row in rows])
            self._groups += len(batch.groups)
            step += 1
        if self._finished_at is not None:
            # TRL asks for a batch more than it trains.
            self._put([self._sample(filler(row), step, version) for row in rows])

    def _wanted(self, step: int) -> bool:
        """True once TRL may need the batch of ``step``; False at the end. The version after n syncs has the steps of
        n - 1 syncs, and TRL asks one step ahead.
        """
        with self._changed:
            while not self._ending:
                applied = self._begins.step + (self._model_version - 1) * self._transfer.steps_a_sync
                if step <= applied + self._transfer.steps_a_sync:
                    return True
                # No engine is awaited here, so the ledger is not silent.
                self._answered_s = time.monotonic()
                self._changed.wait()
            return False

    def _taken(self, step: int) -> RolloutBatch | None:
        """None at the end of the ledger's run, or of TRL's."""
        from p2pcast.ledger_api.batch_client import Finished, Wait

        assert self._steps is not None
        while True:
            found = self._steps.poll(step)
            with self._changed:
                self._answered_s = time.monotonic()
                if isinstance(found, Finished):
                    self._finished_at = step
                    return None
                if not isinstance(found, Wait):
                    return found
                if self._ending or self._changed.wait_for(lambda: self._ending, found.wait_s):
                    return None

    def _put(self, samples: list[Any]) -> None:
        for sample in samples:
            while True:
                with self._changed:
                    if self._ending:
                        return
                    self._answered_s = time.monotonic()
                try:
                    self.rollout_buffer.put(sample, timeout=1.0)
                    break
                except queue.Full:
                    continue

    def _rows_of(self, batch: RolloutBatch) -> list[TrainingRow]:
        """``samples_a_step`` rows. Raises UsageError, IntegrityError."""
        assert self._steps is not None
        rows = self._steps.rows(batch, temperature=self._temperature, kind=self._kind, eps=self._eps)
        logger.info("step %d: batch %s, %d samples", batch.step, batch.id.hex(), len(rows))
        return filled(rows, self._samples, "TRL", batch.step)

    def _sample(self, row: TrainingRow, step: int, model_version: int) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=row.token_ids,
            completion_mask=row.learnt.astype(int),
            old_log_probs=row.logprobs,
            advantage=float(row.advantages[row.learnt][0]) if row.learnt.any() else 0.0,
            # The ledger has judged staleness; TRL must not drop samples of a batch.
            model_version=model_version,
            group_id=self._groups + row.group,
            metrics={"reward": row.reward, "ledger/staleness": float(step - row.oldest_version)},
        )
