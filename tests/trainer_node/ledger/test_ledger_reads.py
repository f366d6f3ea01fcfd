"""Reads of the ledger: beside the writer, as of one commit, and without a way to change rows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, func, select, update

from p2pcast.ground.errors import LocalError
from tests.trainer_node.ledger.ledger_game import ZERO, Game, sample
from trainer_node.ledger import ledger_retention, lineage
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import READERS


@pytest.fixture
def game(play: Callable[..., Game]) -> Game:
    return play(shared_commits=True)


class BusyWriter:
    """Keeps the writer in a transaction that has changed rows."""

    def __init__(self, game: Game) -> None:
        self._begun, self._freed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=game.ledger._transitions.call, args=(self._block,))

    def _block(self, conn: Connection) -> None:
        conn.execute(update(db.meta).values(step=99))
        self._begun.set()
        assert self._freed.wait(60)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._begun.wait(60)

    def __exit__(self, *_: object) -> None:
        self._freed.set()
        self._thread.join()


def test_reads_wait_for_no_transition(game: Game) -> None:
    session = game.join("a")
    (first, *_) = game.add(2)
    leases = game.lease(session, 4)
    game.hand_in(session, leases[:3])
    game.ledger._leased.remove([leases[3].lease])  # as after a restart: memory does not know the job
    before = game.ledger.status()
    with BusyWriter(game):
        assert game.ledger.status() == before
        assert [row["leases"] for row in game.ledger.workers()] == [1]
        assert game.ledger.group(first).state == "complete"
        assert game.ledger.prompts(0).waiting == 0
        assert game.ledger.next_audit(ZERO) is not None
        (job,) = game.ledger.unscored(session, [sample(leases[3], ZERO, 1)])
        assert job == leases[3].job
    assert game.ledger.status()["learner"] == "0.99"


def test_a_read_sees_earlier_answers(game: Game) -> None:
    session = game.join("a", slots=32)
    game.add(8)
    for number in range(1, 9):
        game.lease(session, 1)
        assert game.ledger.status()["leases"] == {"held": number}
        assert game.ledger.workers()[0]["leases"] == number


def test_a_read_sees_one_commit(game: Game) -> None:
    count = select(func.count()).select_from(db.groups)
    with game.store.reading() as conn:
        assert conn.scalar(count) == 0
        game.add(2)
        assert conn.scalar(count) == 0
    with game.store.reading() as conn:
        assert conn.scalar(count) == 2


def test_a_read_cannot_change_rows(game: Game) -> None:
    with pytest.raises(LocalError, match=r"read-?\s?only"), game.store.reading() as conn:
        conn.execute(update(db.meta).values(step=99))
    assert game.ledger.status()["learner"] == "0.0"


def test_reads_of_many_threads_take_turns(game: Game) -> None:
    game.join("a")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(game.ledger.workers()))) for _ in range(3 * READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * len(threads)


def test_groups_are_deleted_in_parts(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_retention, "MOST_JOBS", 7)
    session = game.join("a")
    batch = game.whole_step(session)
    game.add(3)
    game.fill(session)
    game.ledger.ack(game.epoch, 1, [batch], b"c" * 32)
    with game.store.transaction() as conn:
        conn.execute(update(db.meta).values(step=2 * lineage.KEPT_BATCHES))
        conn.execute(update(db.batches).values(state="trained"))
        conn.execute(update(db.groups).where(db.groups.c.state != "open").values(state="trained"))
    commits: list[int] = []
    game.store.boundary = lambda point: commits.append(1) if point == "after commit" else None
    game.ledger.prune()
    assert len(commits) > 3, "all groups were deleted in one transition"
    assert set(game.ledger.status()["groups"]) <= {"open", "waiting"}
