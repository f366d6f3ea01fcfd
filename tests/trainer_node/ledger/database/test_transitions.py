"""Measurements of a transition count once its transaction is committed, and never otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.database.transitions import Transitions


class Measured:
    """Measurements in memory that count what is pending, and what was kept."""

    def __init__(self) -> None:
        self.pending = self.kept = 0

    def mark(self) -> int:
        return self.pending

    def undo(self, mark: int) -> None:
        self.pending = mark

    def keep(self) -> None:
        self.kept, self.pending = self.kept + self.pending, 0

    def measure(self) -> None:
        self.pending += 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    made = LedgerStore(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("shared_commits", [False, True])
@pytest.mark.parametrize("point", ["before fsync", "before commit"])
def test_measurements_of_a_failed_commit_never_count(store: LedgerStore, point: str, shared_commits: bool) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise OSError("the disk is full")

    measured = Measured()
    transitions = Transitions(store, measured, time.monotonic, lambda counts: None)
    transitions.start(lambda conn, now: None, shared_commits=shared_commits)
    store.boundary = fail
    with pytest.raises(OSError, match="the disk is full"):
        transitions.call(lambda conn: measured.measure())
    assert (measured.pending, measured.kept) == (0, 0)
    store.boundary = lambda at: None
    transitions.call(lambda conn: measured.measure())
    transitions.close()
    assert (measured.pending, measured.kept) == (0, 1)
