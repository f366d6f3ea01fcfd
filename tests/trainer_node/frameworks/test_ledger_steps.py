"""Steps of a ledger for other trainers, without a ledger: the journal, fillers, and the end of waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.ledger_api.batch_client import Finished, RolloutBatch, RunFacts
from trainer_node.frameworks import ledger_steps
from trainer_node.frameworks.ledger_steps import TRACKER, LedgerSteps, filled, filler, first_sampled, tracked
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow

ROW = TrainingRow(
    token_ids=np.array([5, 6, 3, 4, 2]),
    learnt=np.array([False, False, True, False, True]),
    logprobs=np.array([0, 0, -1, 0, -2], np.float32),
    advantages=np.array([0, 0, 0.5, 0, 0.5], np.float32),
    temperature=1.0,
    versions=np.array([NOT_SAMPLED, NOT_SAMPLED, 0, NOT_SAMPLED, 1]),
    group=0,
    reward=1.0,
    truncated=False,
)


class PlayedLedger:
    """A client of the ledger that notes its calls, and has a batch for each step before ``last``."""

    def __init__(self, last: int = 9) -> None:
        self.calls: list[Any] = []
        self._last = last

    def facts(self) -> RunFacts:
        return RunFacts("parity", 2, 1)

    def resume(self, branch: int, step: int, digest: bytes | None, batches: Any) -> int:
        self.calls.append(("resume", branch, step, digest is not None, list(batches)))
        return 1

    def poll(self, step: int) -> RolloutBatch | Finished:
        return RolloutBatch(bytes([step]) * 16, step, (), 0, None) if step < self._last else Finished()

    def applied(self, batch: RolloutBatch, step: int) -> None:
        self.calls.append(("applied", batch.step, step))

    def ack(self, step: int, batches: Any, checkpoint: bytes) -> None:
        self.calls.append(("ack", step, list(batches)))


def test_each_step_is_applied_once_and_a_checkpoint_names_the_steps_before(tmp_path: Path) -> None:
    ledger, journal = PlayedLedger(last=3), tmp_path / "deep" / "journal.json"
    steps = LedgerSteps(ledger, journal)  # type: ignore[arg-type]
    steps.begin_by_journal(0, 0, checkpoint=False)
    for step in (0, 0, 1, 2):
        steps.take(step)
    assert set(json.loads(journal.read_text())["batches"]) == {"0", "1", "2"}
    steps.acknowledge(2)
    steps.acknowledge(3)
    ids = [bytes([step]) * 16 for step in range(3)]
    assert ledger.calls == [
        ("resume", 0, 0, False, []),
        ("applied", 0, 1),
        ("applied", 1, 2),
        ("ack", 2, ids[:2]),
        # The last batch is applied by the checkpoint that contains it: no later batch is asked for.
        ("applied", 2, 3),
        ("ack", 3, ids[2:]),
    ]
    assert json.loads(journal.read_text()) == {"batches": {}}
    with pytest.raises(UsageError, match="the ledger's run has ended at step 3: train fewer steps"):
        steps.take(3)


def test_a_trainer_that_begins_again_names_the_batches_of_its_checkpoint(tmp_path: Path) -> None:
    ledger, journal = PlayedLedger(), tmp_path / "journal.json"
    first = LedgerSteps(ledger, journal)  # type: ignore[arg-type]
    first.begin_by_journal(0, 0, checkpoint=False)
    for step in range(4):
        first.take(step)
    LedgerSteps(ledger, journal).begin_by_journal(1, 2, checkpoint=True)  # type: ignore[arg-type]
    assert ledger.calls[-1] == ("resume", 1, 2, True, [bytes(16), bytes([1]) * 16])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"batches": []}', '{"batches": {"x": "00"}}', '{"batches": {"1": 3}}']
)
def test_a_damaged_journal_is_refused(tmp_path: Path, text: str) -> None:
    journal = tmp_path / "journal.json"
    journal.write_text(text)
    with pytest.raises(UsageError, match="does not say which batches were handed out"):
        LedgerSteps(PlayedLedger(), journal).begin_by_journal(0, 0, checkpoint=False)  # type: ignore[arg-type]


def test_a_run_without_checkpoints_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_steps, "MOST_HANDED", 2)
    steps = LedgerSteps(PlayedLedger(), tmp_path / "journal.json")  # type: ignore[arg-type]
    steps.begin_by_journal(0, 0, checkpoint=False)
    for step in range(2):
        steps.take(step)
    with pytest.raises(UsageError, match="2 batches were trained, and no checkpoint of them was acknowledged"):
        steps.take(2)


def test_a_filler_has_one_token_and_no_advantage() -> None:
    assert first_sampled(ROW) == 2
    one = filler(ROW)
    assert one.learnt.tolist() == [False, False, True, False, False]
    assert not one.advantages.any()
    whole = filled([ROW], 3, "the trainer", 7)
    assert whole[0] is ROW
    assert [row.learnt_tokens for row in whole] == [2, 1, 1]
    with pytest.raises(UsageError, match="step 7 has 3 samples, and the trainer trains 2 a step"):
        filled(whole, 2, "the trainer", 7)


def test_the_newest_checkpoint_is_tracked(tmp_path: Path) -> None:
    assert tracked(tmp_path) is None
    for text, found in (("", None), ("12\n", 12), ("release", None)):
        (tmp_path / TRACKER).write_text(text)
        assert tracked(tmp_path) == found
