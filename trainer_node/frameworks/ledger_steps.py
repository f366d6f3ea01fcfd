"""The batches of a ledger for a trainer of another framework: one for each step, in the order of the steps.

Guarantees: asking for the batch of step t tells the ledger that the batch of step t - 1 is applied. A checkpoint of t
steps contains the batches of the steps before t, and ``acknowledge`` names them to the ledger. ``begin`` continues from
a checkpoint: the ledger opens later batches again. So each batch is trained at most once on the way to any checkpoint
that survives.

A trainer whose checkpoints cannot hold the names of batches gives a journal: a file with the batches since the last
acknowledged checkpoint. Each batch is in the journal before the trainer sees it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2pcast.daemon.daemon_requests import DEFAULT_URL, TIMEOUT_S, ask
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version

if TYPE_CHECKING:
    from p2pcast.ledger_api.batch_client import BatchClient, Finished, RolloutBatch, RunFacts, Wait
    from trainer_node.learning.objective.advantages import AdvantageKind
    from trainer_node.learning.objective.training_rows import TrainingRow

POSITION: Final = "p2pcast-ledger.json"
"""In a checkpoint's folder: its step, its batches since the checkpoint before, and the digest that the ledger knows."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""In a folder of checkpoints, by Megatron and verl: the number of the newest whole checkpoint."""
DIGEST_BYTES: Final = 32
MOST_HANDED: Final = 4096
"""Batches without an acknowledged checkpoint: the ledger takes so many names at once."""
GIVE_UP_S: Final = 300.0
"""Time in seconds for one request to a ledger that does not answer."""
PATIENCE_S: Final = 3600.0
"""Time in seconds for one batch, while the ledger answers."""
SAY_S: Final = 60.0
"""Time in seconds between two warnings of a wait."""
logger = logging.getLogger("p2pcast.ledger")


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """``url``, ``bearer_file``, ``hub``, ``token_file``: as of ``BatchClient``. ``hub_http``: URL of the hub's HTTP
    server. ``patience_s``: longest wait for a batch, in seconds. ``give_up_s``: for an answer of the ledger.
    """

    url: str
    bearer_file: str | None = None
    hub: str | None = None
    token_file: str | None = None
    hub_http: str = DEFAULT_URL
    patience_s: float = PATIENCE_S
    give_up_s: float = GIVE_UP_S

    def client(self) -> BatchClient:
        from p2pcast.ledger_api.batch_client import BatchClient

        return BatchClient(
            self.url,
            bearer_file=self.bearer_file,
            hub=self.hub,
            token_file=self.token_file,
            give_up_s=self.give_up_s,
        )


@dataclass(frozen=True, slots=True)
class ResumePosition:
    """Where a run continues. ``batches``: ids since the checkpoint before."""

    step: int = 0
    batches: tuple[bytes, ...] = ()
    digest: bytes | None = None

    def write(self, file: Path) -> None:
        """``digest`` is not None. Raises LocalError."""
        assert self.digest is not None
        found = {"step": self.step, "batches": [batch.hex() for batch in self.batches], "digest": self.digest.hex()}
        atomic_write(file, json.dumps(found).encode())

    @classmethod
    def read(cls, file: Path) -> ResumePosition:
        """Raises OSError, ValueError, KeyError, TypeError."""
        found = json.loads(file.read_text())
        batches = tuple(bytes.fromhex(batch) for batch in found["batches"])
        return cls(int(found["step"]), batches, bytes.fromhex(found["digest"]))


class LedgerSteps:
    """``journal``: a file of this run alone. Calls come from one thread; ``acknowledge`` may come from another one."""

    def __init__(self, client: BatchClient, journal: Path | None = None) -> None:
        self._client, self._journal = client, journal
        self._staleness = 0
        self._guard = threading.Lock()
        self._handed: dict[int, bytes] = {}
        """Ids of batches since the last acknowledged checkpoint, by step."""
        self._before: RolloutBatch | None = None
        """The batch that was asked for last, until the ledger knows that it is applied."""

    def begin(self, branch: int, position: ResumePosition) -> RunFacts:
        """Train on from ``position``; ``branch`` has its weights. Returns the ledger's facts. Raises RefusedError,
        RemoteError, RetryableError.
        """
        facts = self._client.facts()
        self._client.resume(branch, position.step, position.digest, position.batches)
        self._staleness, self._before = facts.staleness, None
        with self._guard:
            self._handed = {}
            self._write()
        return facts

    def begin_by_journal(self, branch: int, step: int, *, checkpoint: bool) -> RunFacts:
        """Train on from step ``step``; ``checkpoint``: from one of so many steps, else from the first weights. Raises
        LocalError for a journal that cannot be read, and the errors of ``begin``.
        """
        assert self._journal is not None
        digest = secrets.token_bytes(DIGEST_BYTES) if checkpoint else None
        contained = [batch for number, batch in sorted(_journal(self._journal).items()) if number < step]
        return self.begin(branch, ResumePosition(step, tuple(contained), digest))

    def poll(self, step: int) -> RolloutBatch | Finished | Wait:
        """The batch of ``step``, if there is one now; the batch before it is trained. Raises RefusedError, RemoteError,
        RetryableError.
        """
        from p2pcast.ledger_api.batch_client import RolloutBatch

        before = self._before
        if before is not None and before.step < step:
            self._client.applied(before, step)
            self._before = None
        if len(self._handed) >= MOST_HANDED and step not in self._handed:
            raise UsageError(
                f"{MOST_HANDED} batches were trained, and no checkpoint of them was acknowledged: write checkpoints"
            )
        found = self._client.poll(step)
        if isinstance(found, RolloutBatch):
            with self._guard:
                self._handed[step] = found.id
                self._write()
            self._before = found
        return found

    def take(self, step: int, patience_s: float = PATIENCE_S) -> RolloutBatch:
        """As ``poll``, once there is a batch. Raises RetryableError if there is none within ``patience_s``, UsageError
        once the ledger's run has ended.
        """
        from p2pcast.ledger_api.batch_client import Finished, Wait

        began = said = time.monotonic()
        while isinstance(found := self.poll(step), Wait):
            now = time.monotonic()
            text = f"the ledger has had no batch for step {step} for {now - began:.0f} s: do workers run?"
            if now - began > patience_s:
                raise RetryableError(f"{text} `p2pcast status` shows them, and the versions of their engines")
            if now - said > SAY_S:
                logger.warning("%s", text)
                said = now
            time.sleep(found.wait_s)
        if isinstance(found, Finished):
            raise UsageError(f"the ledger's run has ended at step {step}: train fewer steps, or raise its --last-step")
        return found

    def acknowledge(self, step: int, file: Path | None = None) -> None:
        """A whole checkpoint has ``step`` steps. ``file``: a part of the checkpoint, written now. Raises LocalError,
        RefusedError, RemoteError, RetryableError.
        """
        before = self._before
        if before is not None and before.step == step - 1:
            self._client.applied(before, step)
        with self._guard:
            contained = tuple(batch for number, batch in sorted(self._handed.items()) if number < step)
        position = ResumePosition(step, contained, secrets.token_bytes(DIGEST_BYTES))
        assert position.digest is not None
        if file is not None:
            position.write(file)
        self._client.ack(step, contained, position.digest)
        with self._guard:
            self._handed = {number: batch for number, batch in self._handed.items() if number >= step}
            self._write()

    def rows(
        self, batch: RolloutBatch, *, temperature: float | None, kind: AdvantageKind = "grpo", eps: float = 1e-4
    ) -> list[TrainingRow]:
        """``temperature``: of the trainer; None: the trainer takes each row's own. ``kind``, ``eps``: as of
        ``group_advantages``. Raises UsageError for another temperature, IntegrityError.
        """
        from trainer_node.learning.objective.training_rows import rows_of

        rows = rows_of(
            batch,
            kind=kind,
            eps=eps,
            overlong="keep",
            step=batch.step,
            staleness=self._staleness,
            # The ledger has compared the ids with the task's vocabulary.
            vocabulary=sys.maxsize,
        )
        for row in rows:
            if temperature is not None and row.temperature != temperature:
                raise UsageError(
                    f"the ledger's samples have temperature {row.temperature}, and the trainer computes with"
                    f" {temperature}: give p2pcast ledger --temperature and the trainer's temperature the same value"
                )
        return rows

    def _write(self) -> None:
        """Under the guard."""
        if self._journal is not None:
            self._journal.parent.mkdir(parents=True, exist_ok=True)
            found = {str(number): batch.hex() for number, batch in sorted(self._handed.items())}
            atomic_write(self._journal, json.dumps({"batches": found}).encode())


def _journal(file: Path) -> dict[int, bytes]:
    """Batches by step. Raises UsageError."""
    try:
        found = json.loads(file.read_text())["batches"]
        return {int(number): bytes.fromhex(batch) for number, batch in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} does not say which batches were handed out ({error}): resume from the newest checkpoint that the"
            " ledger has acknowledged, without this file"
        ) from None


def tracked(folder: Path) -> int | None:
    """The number of the newest whole checkpoint in ``folder``; None without one, or while a trainer writes it."""
    try:
        return int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def filled(rows: Sequence[TrainingRow], count: int, framework: str, step: int) -> list[TrainingRow]:
    """``count`` rows: those of a batch, and fillers after them. Raises UsageError for more rows than ``count``."""
    if len(rows) > count:
        raise UsageError(
            f"the ledger's batch of step {step} has {len(rows)} samples, and {framework} trains {count} a step: lower"
            f" --batch-groups or --group-size of p2pcast ledger, or raise {framework}'s batch size"
        )
    return [*rows, *(filler(rows[number % len(rows)]) for number in range(count - len(rows)))]


def filler(row: TrainingRow) -> TrainingRow:
    """A copy that changes no gradient. One token is learnt from: losses of other trainers need a token in each row."""
    import numpy as np

    learnt = row.learnt.copy()
    learnt[learnt.nonzero()[0][1:]] = False
    return dataclasses.replace(row, learnt=learnt, advantages=np.zeros_like(row.advantages))


def first_sampled(row: TrainingRow) -> int:
    """The number of tokens before the first that the policy sampled: the length of the prompt."""
    from trainer_node.learning.objective.training_rows import NOT_SAMPLED

    return int((row.versions != NOT_SAMPLED).argmax())


def newest_version(hub: str) -> Version:
    """At the hub with this HTTP address. Raises RetryableError (no version, or no hub), RefusedError."""
    manifests = dict(ask(hub.rstrip("/"), "/versions", timeout_s=TIMEOUT_S)["manifests"])
    if not manifests:
        raise RetryableError(f"the hub at {hub} has no version: the trainer's first weights are not published")
    return max(map(Version.parse, manifests))
