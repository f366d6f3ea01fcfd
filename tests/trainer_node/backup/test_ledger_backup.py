"""Backups of a ledger, on SQLite and PostgreSQL: made while transitions run, restored behind or beside a learner."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import update

from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from tests.trainer_node.ledger.postgresql_cluster import Cluster
from trainer_node.backup import ledger_backup, run_backup
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger

CHECKPOINT = b"c" * 32


def copied(game_state: Path, database: str | None, to: Path) -> Path:
    run_backup.make(to, None, game_state, database)
    return to


def restored(source: Path, to: Path, step: int, database: str | None) -> int | None:
    return run_backup.restored(source, None, None, to, step, database).dropped


def opened(game: Game, state: Path, database: str | None) -> Ledger:
    return Ledger(LedgerStore(state, database, segment_bytes=2048), game.policy, now=lambda: game.source_s)


def bodies_of(state: Path, database: str | None) -> int:
    """The number of results, after a look at each one's bytes."""
    with closing(LedgerStore(state, database)) as store:
        rows = dump(store)
        check_rows(rows)
        found = [row for row in rows["results"] if row.segment is not None]
        for row in found:
            assert store.segments.read(Place(row.segment, row.offset, row.length))
    return len(found)


def test_backup_of_a_working_ledger_holds_the_bytes_of_every_row(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    session, ended = game.join("a"), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not ended.is_set():
                batch = game.whole_step(session)
                game.ledger.ack(game.epoch, game.step, [batch], CHECKPOINT)
                game.source_s += 4000.0
                game.ledger.prune()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    game.whole_step(session)
    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(4):
            copied(state, database, tmp_path / f"backup-{number}")
    finally:
        ended.set()
        worker.join()
    assert failures == []
    for number in range(4):
        target = new_database()
        restored(tmp_path / f"backup-{number}", tmp_path / f"restored-{number}", 0, target)
        assert bodies_of(tmp_path / f"restored-{number}", target) > 0


def test_segment_that_retention_removes_meanwhile_is_not_missed(
    tmp_path: Path, game: Game, state: Path, database: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = game.join("a")
    for _ in range(20):
        batch = game.whole_step(session)
        game.ledger.ack(game.epoch, game.step, [batch], CHECKPOINT)
    snapshot, looks = ledger_backup.snapshot, []

    def and_prune(*words: object) -> None:
        snapshot(*words)  # type: ignore[arg-type]
        looks.append(len(list((state / "bodies").glob("*.seg"))))
        if len(looks) == 1:
            game.source_s += 4000.0
            game.ledger.prune()

    monkeypatch.setattr(ledger_backup, "snapshot", and_prune)
    copied(state, database, tmp_path / "backup")
    assert looks[1] < looks[0], "retention has removed segments"
    restored(tmp_path / "backup", tmp_path / "restored", 0, None)
    assert bodies_of(tmp_path / "restored", None) > 0


def test_learner_ahead_of_the_backup_trains_no_result_again(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    session = game.join("a")
    batches = [game.whole_step(session)]
    game.add(6)
    game.hand_in(session, game.lease(session, 8))
    before = game.ledger.status()
    copied(state, database, tmp_path / "backup")
    trained = set()
    for _ in range(3):
        game.add(2)
        game.fill(session)
        taken = game.take().batch
        assert taken is not None
        trained |= {bytes(member.group) for member in taken.members}
        batches.append(game.learn())
    assert game.step == 4
    # As it is, the copy refuses the learner, and says what to do.
    restored(tmp_path / "backup", tmp_path / "behind", 1, target := new_database())
    with closing(opened(game, tmp_path / "behind", target)) as ledger:
        assert ledger.status()["groups"] == before["groups"]
        with pytest.raises(RefusedError, match=r"no batch leads to step 4.* restore --step 4"):
            ledger.resume(1, 4, CHECKPOINT, batches)
    dropped = restored(tmp_path / "backup", tmp_path / "moved", 4, target := new_database())
    assert dropped == 8, "six of no batch, and two of a batch that was in no checkpoint"
    with closing(opened(game, tmp_path / "moved", target)) as ledger:
        game.ledger.close()
        game.ledger, game.epoch, game.branch = ledger, ledger.resume(1, 4, CHECKPOINT, batches), 1
        game.publish()
        session = game.join("b")
        for _ in range(3):
            game.add(2)
            game.fill(session)
            taken = game.take().batch
            assert taken is not None
            assert not trained & {bytes(member.group) for member in taken.members}
            game.learn()
        assert game.step == 7
    assert bodies_of(tmp_path / "moved", target) > 0
    game.start()  # for the fixture


def test_cut_batch_of_the_backup_is_forgotten_if_the_learner_is_ahead(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    """The learner died after the backup, and was given another batch for the same step."""
    session = game.join("a")
    first = game.whole_step(session)
    game.ledger.ack(game.epoch, 1, [first], CHECKPOINT)
    game.add(2)
    game.fill(session)
    cut = game.take().batch
    assert cut is not None
    copied(state, database, tmp_path / "backup")
    game.epoch, game.branch = game.ledger.resume(1, 1, CHECKPOINT, []), 1
    other = game.take().batch
    assert other is not None
    assert other.id != cut.id
    for contained in ([other.id], [cut.id]):
        to, target = tmp_path / f"moved-{contained[0].hex()}", new_database()
        assert restored(tmp_path / "backup", to, 2, target) == 2
        with closing(opened(game, to, target)) as ledger:
            assert ledger.resume(2, 2, CHECKPOINT, contained) == 2


def test_learner_of_another_lineage_is_refused(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    """After the backup the learner went back, and came to the backup's step again by another batch."""
    session = game.join("a")
    game.whole_step(session)
    copied(state, database, tmp_path / "backup")
    game.epoch, game.branch, game.step = game.ledger.resume(1, 0, None, []), 1, 0
    game.publish()
    other = game.whole_step(session)
    target = new_database()
    assert restored(tmp_path / "backup", tmp_path / "behind", 1, target) == 0
    with (
        closing(opened(game, tmp_path / "behind", target)) as ledger,
        pytest.raises(RefusedError, match="the ledger is an older copy"),
    ):
        ledger.resume(2, 1, CHECKPOINT, [other])


def test_versions_after_the_backup_are_learnt_and_stale_leases_unknown(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    session = game.join("a")
    copied(state, database, tmp_path / "backup")
    game.add(2)
    leases = game.lease(session)
    restored(tmp_path / "backup", tmp_path / "restored", 0, target := new_database())
    game.ledger.close()
    with closing(opened(game, tmp_path / "restored", target)) as ledger:
        game.ledger = ledger
        ledger.publish(Version(0, 7), manifest(Version(0, 7)))
        session = game.join("a")
        assert {one.verdict for one in game.hand_in(session, leases)} == {"rejected"}
        assert "accepted" not in ledger.status()["jobs"]
    game.start()


def test_database_with_rows_is_not_overwritten(tmp_path: Path, game: Game, state: Path, database: str | None) -> None:
    copied(state, database, tmp_path / "backup")
    if database is None:
        with pytest.raises(UsageError, match="exists: name a new folder"):
            restored(tmp_path / "backup", state, 0, None)
        return
    with pytest.raises((UsageError, LocalError), match="a ledger's tables already"):
        restored(tmp_path / "backup", tmp_path / "restored", 0, database)
    assert not (tmp_path / "restored").exists()


def test_ledger_without_its_database_is_no_backup(
    tmp_path: Path, game: Game, state: Path, database: str | None
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(state / "http.key", other / "http.key")
    with pytest.raises(UsageError, match=r"has no ledger\.db: name the ledger's PostgreSQL"):
        copied(other, None, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("new_database", ["postgresql"], indirect=True)
def test_tables_of_another_release_are_refused(tmp_path: Path, game: Game, state: Path, database: str | None) -> None:
    """An SQLite copy keeps the tables as they are, and the ledger refuses them."""
    with game.store.connection.begin():
        game.store.connection.execute(update(db.meta).values(schema=9))
    with pytest.raises(UsageError, match="no ledger's tables of version"):
        copied(state, database, tmp_path / "backup")
    with game.store.connection.begin():
        game.store.connection.execute(update(db.meta).values(schema=db.SCHEMA))


@pytest.mark.parametrize("new_database", ["postgresql"], indirect=True)
def test_database_of_a_ledger_before_schedules_is_backed_up(
    tmp_path: Path, game: Game, state: Path, database: str | None, new_database: Callable[[], str | None]
) -> None:
    session = game.join("a")
    game.whole_step(session)
    with game.store.connection.begin():
        db.schedules.drop(game.store.connection)
    copied(state, database, tmp_path / "backup")
    restored(tmp_path / "backup", tmp_path / "restored", 1, target := new_database())
    assert bodies_of(tmp_path / "restored", target) > 0


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
def test_copy_of_a_ledger_before_schedules_is_restored(
    tmp_path: Path, game: Game, state: Path, cluster: Cluster
) -> None:
    game.whole_step(game.join("a"))
    with game.store.connection.begin():
        db.schedules.drop(game.store.connection)
    copied(state, None, tmp_path / "backup")
    restored(tmp_path / "backup", tmp_path / "restored", 1, target := cluster.database())
    assert bodies_of(tmp_path / "restored", target) > 0


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
def test_ledger_moves_from_sqlite_to_postgresql(tmp_path: Path, game: Game, state: Path, cluster: Cluster) -> None:
    session = game.join("a")
    game.whole_step(session)
    before = dump(game.store)
    copied(state, None, tmp_path / "backup")
    restored(tmp_path / "backup", tmp_path / "moved", 1, target := cluster.database())
    with closing(LedgerStore(tmp_path / "moved", target)) as store:
        after = dump(store)
    assert {name: sorted(map(repr, rows)) for name, rows in after.items()} == {
        name: sorted(map(repr, rows)) for name, rows in before.items()
    }
    assert not (tmp_path / "moved" / "ledger.db").exists()
    game.ledger.close()
    game.store = LedgerStore(tmp_path / "moved", target)
    game.ledger = Ledger(game.store, game.policy, now=lambda: game.source_s)
    game.whole_step(session)
    assert bodies_count(game) > 0


def bodies_count(game: Game) -> int:
    return len([row for row in dump(game.store)["results"] if row.segment is not None])
