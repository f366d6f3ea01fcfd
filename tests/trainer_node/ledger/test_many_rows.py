"""Statements over more rows than a database takes parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert, select, update

from tests.trainer_node.ledger.crash_run import TASK_HASH, group
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import dump
from trainer_node.ledger import ledger_rows
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import Store

MORE = 66_000
"""PostgreSQL takes 65535 parameters."""


@pytest.fixture
def game(opened: Callable[[], Store]) -> Iterator[Game]:
    made = Game(opened)
    yield made
    made.ledger.close()


def test_more_groups_than_parameters_are_changed_and_forgotten(game: Game) -> None:
    body = group(0).to_bytes()
    shared = {"added_step": 0, "state": "waiting", "purpose": "train", "task_hash": TASK_HASH, "size": 3, "body": body}
    rows = [{"id": n.to_bytes(16, "big"), "added": n, "stale_endings": 0, **shared} for n in range(MORE)]
    with game.store.transaction() as conn:
        conn.execute(insert(db.groups), rows)
        found = conn.scalars(select(db.groups.c.id)).all()
        ledger_rows.move_all(conn, "group", db.groups, found, "dropped", ended_step=0, ended_epoch=1)
        conn.execute(update(db.meta).values(step=2 * ledger_rows.KEPT_BATCHES))
    game.ledger.prune()
    assert dump(game.store)["groups"] == []


def test_lists_of_a_whole_step_are_bounded(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rows, "MAX_LISTED", 1)
    longest = 0

    def counted(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        nonlocal longest
        if not executemany and " IN (" in statement:
            longest = max(longest, len(parameters))

    session = game.join("a", slots=32)
    game.add(2)
    event.listen(game.store.connection, "before_cursor_execute", counted)
    game.fill(session)
    batch = game.learn()
    game.ledger.ack(game.epoch, 1, [batch], b"c" * 32)
    with game.store.transaction() as conn:
        conn.execute(update(db.meta).values(step=2 * ledger_rows.KEPT_BATCHES))
    game.ledger.prune()
    assert 0 < longest < 20
    assert dump(game.store)["jobs"] == []
