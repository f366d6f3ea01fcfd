"""Statements over many rows: more than a database takes parameters, or than a transition may look at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, select, update

from p2pcast.ground.version import Version
from tests.trainer_node.ledger.crash_run import TASK_HASH, group
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import dump
from trainer_node.ledger import ledger_retention, ledger_rows, lineage
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore

MORE = 66_000
"""PostgreSQL takes 65535 parameters."""


@pytest.fixture
def game(opened: Callable[[], LedgerStore]) -> Iterator[Game]:
    made = Game(opened)
    yield made
    made.ledger.close()


def test_more_groups_than_parameters_are_changed_and_forgotten(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_retention, "MOST_JOBS", 3 * ledger_rows.MAX_LISTED)
    body = group(0).to_bytes()
    shared = {"added_step": 0, "state": "waiting", "purpose": "train", "task_hash": TASK_HASH, "size": 3, "body": body}
    rows = [{"id": n.to_bytes(16, "big"), "added": n, "stale_endings": 0, **shared} for n in range(MORE)]
    with game.store.transaction() as conn:
        conn.execute(insert(db.groups), rows)
        found = conn.scalars(select(db.groups.c.id)).all()
        ledger_rows.move_all(conn, "group", db.groups, found, "dropped", ended_step=0, ended_epoch=1)
        conn.execute(update(db.meta).values(step=2 * lineage.KEPT_BATCHES))
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
        conn.execute(update(db.meta).values(step=2 * lineage.KEPT_BATCHES))
    game.ledger.prune()
    assert 0 < longest < 20
    assert dump(game.store)["jobs"] == []


BIG = re.compile(r"\bSCAN (groups|jobs|leases|results)\b")


def test_no_transition_looks_at_all_rows_of_a_big_table(tmp_path: Path) -> None:
    """Requests for leases wait for the writer. Plans say what a database with many rows would do."""
    game = Game(lambda: LedgerStore(tmp_path), asks_hub=True)
    statements: dict[str, Any] = {}

    def noted(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            statements[statement] = parameters[0] if executemany else parameters

    event.listen(game.store.connection, "before_cursor_execute", noted)
    session, other = game.join("a"), game.join("b")
    game.add(4)
    leases = game.lease(session, 6)
    game.ledger.heartbeat(session, {leases[0].lease: 1})
    game.ledger.give_back(session, [leases[0].lease])
    game.hand_in(session, leases[1:3], version=Version(0, 99))
    game.source_s += 100
    game.ledger.expire()
    game.fill(other)
    batches = [game.learn(), game.whole_step(other)]
    game.ledger.ack(game.epoch, 2, batches, b"c" * 32)
    game.take()
    game.source_s += 2 * ledger_retention.LATE_S
    with game.store.transaction() as conn:
        conn.execute(update(db.meta).values(step=2 * lineage.KEPT_BATCHES))
    game.ledger.prune()
    event.remove(game.store.connection, "before_cursor_execute", noted)
    assert dump(game.store)["jobs"] == []
    scans = []
    with game.store.reading() as conn:
        for statement, parameters in statements.items():
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            scans += [(row[3], statement) for row in plan if BIG.search(row[3])]
    game.ledger.close()
    assert len(statements) > 40
    assert scans == []
