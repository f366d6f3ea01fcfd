"""A batch whose bytes are damaged is cut anew, and the damaged results are played again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_node.ledger.ledger_game import Game, groups_of
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.ledger.batch_transitions import CutBatch
from trainer_node.ledger.database.body_segments import HEAD_BYTES
from trainer_node.ledger.database.ledger_store import LedgerStore


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


def damage(folder: Path, batch: CutBatch, number: int) -> None:
    place = batch.members[0].results[number].place
    with open(folder / "bodies" / f"{place.segment}.seg", "r+b") as file:
        file.seek(place.offset + HEAD_BYTES)
        file.write(b"damage")


def test_batch_is_cut_without_the_damaged_group(game: Game, tmp_path: Path) -> None:
    session = game.join("a")
    game.add(3)
    game.fill(session)
    taken = game.take()
    assert taken.batch is not None
    assert game.ledger.reopen_damaged(taken.batch) == 0
    damage(tmp_path, taken.batch, 1)
    assert game.ledger.reopen_damaged(taken.batch) == 1
    check_rows(dump(game.store))
    [job] = game.lease(session, 1)
    assert job.job.id == groups_of(taken)[0]
    game.fill(session)
    again = game.take()
    assert again.batch is not None
    assert game.ledger.reopen_damaged(again.batch) == 0
    assert again.batch.id != taken.batch.id
    game.learn()


def test_lost_segment_damages_all_its_results(game: Game, tmp_path: Path) -> None:
    session = game.join("a")
    game.add(2)
    game.fill(session)
    taken = game.take()
    assert taken.batch is not None
    for file in (tmp_path / "bodies").glob("*.seg"):
        file.unlink()
    assert game.ledger.reopen_damaged(taken.batch) == 6
    assert game.ledger.status()["jobs"] == {"open": 6}
    assert game.ledger.reopen_damaged(taken.batch) == 0, "the batch is not cut any more"
    assert game.ledger.next_audit(game.version) is None
    check_rows(dump(game.store))
