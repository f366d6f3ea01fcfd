"""Checks after a run whose parts were killed: by the learner's checkpoint, and by the rows of the ledger."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from killable_learner import BOUNDARIES, Checkpoint

from tests.trainer_node.ledger.ledger_invariants import Rows, check_rows, dump
from trainer_node.ledger.database.ledger_store import LedgerStore


def plan(parts: Sequence[str], count: int, seed: int) -> list[tuple[str, str | None]]:
    """Which part is killed, turn by turn: all parts equally often, in a random order. A learner dies at each boundary
    in turn; None: the moment is random.
    """
    drawn = random.Random(seed)
    victims = [parts[number % len(parts)] for number in range(count)]
    drawn.shuffle(victims)
    boundaries = drawn.sample(BOUNDARIES, len(BOUNDARIES)) * count
    return [(victim, boundaries.pop() if victim == "learner" else None) for victim in victims]


def check_lineage(folder: Path, steps: int, staleness: int) -> Checkpoint:
    """The learner's checkpoint at the end: one batch a step, nothing trained twice, nothing stale."""
    found = Checkpoint.read(folder)
    assert found.step == steps
    assert [batch.step for batch in found.lineage] == list(range(steps))
    for what in (
        [batch.id for batch in found.lineage],
        [group for batch in found.lineage for group in batch.groups],
        [job for batch in found.lineage for job in batch.jobs],
    ):
        assert len(what) == len(set(what)), "trained twice"
    assert all(batch.oldest >= batch.step - staleness for batch in found.lineage)
    return found


def check_ledger(folder: Path, database: str | None, found: Checkpoint, staleness: int) -> Rows:
    """The rows of a ledger that has ended agree with the learner's checkpoint."""
    store = LedgerStore(folder, database)
    try:
        rows = dump(store)
    finally:
        store.close()
    check_rows(rows)
    (meta,) = rows["meta"]
    assert meta.step == found.step
    lineage = {batch.id: batch for batch in found.lineage}
    trained = {bytes(row.id).hex(): row for row in rows["batches"] if row.state == "trained"}
    assert {row.state for row in rows["batches"]} <= {"trained", "reopened"}
    assert trained.keys() <= lineage.keys(), "the ledger trained a batch that no checkpoint contains"
    kept = [batch for batch in found.lineage if batch.id in trained]
    assert kept[-1] == found.lineage[-1], "retention keeps the newest"
    assert found.lineage[-len(kept) :] == kept
    jobs_of: dict[str, set[str]] = {batch: set() for batch in trained}
    group_of = {bytes(row.id): bytes(row.group_id) for row in rows["jobs"]}
    batch_of = {bytes(row.group_id): bytes(row.batch_id).hex() for row in rows["batch_members"]
                if bytes(row.batch_id).hex() in trained}  # fmt: skip
    counted: Counter[bytes] = Counter()
    for row in rows["results"]:
        batch = batch_of.get(group_of[bytes(row.job_id)])
        if row.verdict == "accepted":
            counted[bytes(row.job_id)] += 1
            if batch is not None and row.oldest_step >= lineage[batch].step - staleness:
                jobs_of[batch].add(bytes(row.job_id).hex())
    assert set(counted.values()) <= {1}, "a result is counted twice"
    for batch in trained:
        assert jobs_of[batch] == set(lineage[batch].jobs)
    # The run has ended: no job waits for a worker, and none is with one.
    assert not [row for row in rows["jobs"] if row.state in ("open", "leased")], "a job is lost"
    assert not [row for row in rows["leases"] if row.state == "held"]
    return rows
