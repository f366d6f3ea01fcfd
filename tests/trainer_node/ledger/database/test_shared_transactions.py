"""Calls of many threads that share commits: each takes effect exactly once, or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Column, Connection, MetaData, String, Table, func, insert, select

from p2pcast.ground.errors import LocalError, UsageError
from tests.support.until import wait_until
from tests.trainer_node.ledger.ledger_game import ZERO, Game, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database import shared_transactions
from trainer_node.ledger.database.body_segments import Place, Segments
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.database.shared_transactions import SharedTransactions

THREADS = 8
CALLS = 25


SOURCES = Table("sources", MetaData(), Column("source", String, primary_key=True))


def opened(folder: Path) -> LedgerStore:
    made = LedgerStore(folder, segment_bytes=1 << 16)
    with made.connection.begin():
        SOURCES.create(made.connection)
    return made


def shared(store: LedgerStore, **limits: float) -> SharedTransactions:
    return SharedTransactions(lambda: store.transaction(), store.note_failure, **limits)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    made = opened(tmp_path)
    yield made
    made.close()


def write(store: LedgerStore, source: str, body: bytes | None = None) -> Callable[[Connection], Place | None]:
    def transition(conn: Connection) -> Place | None:
        place = None if body is None else store.segments.append(body)
        conn.execute(insert(SOURCES).values(source=source))
        return place

    return transition


def sources(store: LedgerStore) -> list[str]:
    with store.connection.begin():
        return sorted(store.connection.scalars(select(SOURCES.c.source)))


class Blocker:
    """A call that keeps the writer busy, so that later calls gather behind it."""

    def __init__(self, commits: SharedTransactions) -> None:
        self._begun, self._freed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._call, args=(commits,))
        self._thread.start()
        assert self._begun.wait(10)

    def _call(self, commits: SharedTransactions) -> None:
        with contextlib.suppress(LocalError):  # begun, and longer than a caller waits
            commits.call(self._block)

    def _block(self, _: Connection) -> None:
        self._begun.set()
        assert self._freed.wait(10)

    def free(self) -> None:
        self._freed.set()
        self._thread.join()


def test_calls_of_many_threads_each_take_effect_once(store: LedgerStore) -> None:
    commits, made = shared(store), []
    store.boundary = lambda point: made.append(1) if point == "after commit" else None

    def call(thread: int) -> None:
        for number in range(CALLS):
            commits.call(write(store, f"{thread}.{number}"))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(call, range(THREADS)))
    commits.close()
    assert sources(store) == sorted(f"{t}.{n}" for t in range(THREADS) for n in range(CALLS))
    assert len(made) < THREADS * CALLS, "no commit was shared"


def test_failing_call_disturbs_no_other(store: LedgerStore) -> None:
    commits = shared(store)
    places: dict[int, Place | None] = {}

    def call(number: int) -> None:
        if number % 3:
            places[number] = commits.call(write(store, str(number), b"body %d" % number))
            return

        def failing(conn: Connection) -> None:
            write(store, str(number), b"lost %d" % number)(conn)
            raise UsageError("the caller's fault")

        with pytest.raises(UsageError, match="the caller's fault"):
            commits.call(failing)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(call, range(60)))
    commits.close()
    assert sources(store) == sorted(str(n) for n in range(60) if n % 3)
    for number, place in places.items():
        assert place is not None
        assert store.segments.read(place) == b"body %d" % number


def test_failing_commit_fails_every_call_and_leaves_nothing(store: LedgerStore) -> None:
    commits = shared(store)

    def fail(point: str) -> None:
        if point == "before commit":
            raise OSError("the disk is full")

    store.boundary = fail
    with ThreadPoolExecutor(THREADS) as threads:
        calls = [threads.submit(commits.call, write(store, str(n), b"lost")) for n in range(THREADS)]
        errors = [call.exception(600) for call in calls]
    assert {str(error) for error in errors} == {"the disk is full"}
    store.boundary = lambda _: None
    assert sources(store) == []
    place = commits.call(write(store, "after", b"kept"))
    commits.close()
    assert place is not None
    assert store.segments.read(place) == b"kept"
    assert sources(store) == ["after"]


def test_call_that_was_not_begun_in_time_never_takes_effect(store: LedgerStore) -> None:
    commits = shared(store, call_s=0.05)
    blocker = Blocker(commits)
    with pytest.raises(LocalError, match="behind"):
        commits.call(write(store, "late"))
    blocker.free()
    commits.close()
    assert sources(store) == []


def committed(store: LedgerStore, calls: dict[str, bool]) -> list[str]:
    """Names of calls and commits in the order of their work. ``calls``: waiting ones by name, and whether urgent."""
    commits, order = shared(store), list[str]()
    blocker = Blocker(commits)
    store.boundary = lambda point: order.append("commit") if point == "after commit" else None

    def call(name: str, *, urgent: bool) -> None:
        commits.call(lambda _: order.append(name), urgent=urgent)

    with ThreadPoolExecutor(len(calls)) as threads:
        for number, (name, urgent) in enumerate(calls.items()):
            threads.submit(call, name, urgent=urgent)
            wait_until(lambda: commits.waiting, holds=number.__lt__)
        blocker.free()
    commits.close()
    return order


def test_urgent_call_is_committed_before_waiting_ordinary_calls(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_transactions, "COMMIT_S", 60.0)  # the commit would have time for all
    order = committed(store, {"a": False, "b": False, "U": True, "V": True})
    assert order == ["U", "V", "commit", "a", "b", "commit"]


def test_endless_urgent_calls_leave_turns_to_ordinary_calls(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_transactions, "COMMIT_S", -1.0)  # a commit has time for one call
    order = committed(store, {"a": False, "b": False, "U": True, "V": True, "W": True})
    assert [name for name in order if name != "commit"] == ["U", "a", "V", "b", "W"]


def test_calls_before_the_end_are_committed_and_later_calls_refused(store: LedgerStore) -> None:
    commits = shared(store)
    commits.call(write(store, "before"))
    commits.close()
    commits.close()
    with pytest.raises(LocalError, match="closing"):
        commits.call(write(store, "after"))
    assert sources(store) == ["before"]


# -- bodies


def test_body_of_a_call_that_failed_cuts_no_other_off(tmp_path: Path) -> None:
    """Bodies without rows lie between others: the next process keeps all that have rows."""
    store = opened(tmp_path)
    commits, places = shared(store), {}
    for number in range(20):
        if number % 2:
            places[number] = commits.call(write(store, str(number), b"body %d" % number))
            continue
        with pytest.raises(UsageError):
            commits.call(_failing(store, number))
    commits.close()
    store.close()
    again = LedgerStore(tmp_path)
    for number, place in places.items():
        assert place is not None
        assert again.segments.read(place) == b"body %d" % number
    again.close()


def _failing(store: LedgerStore, number: int) -> Callable[[Connection], None]:
    def transition(conn: Connection) -> None:
        write(store, str(number), b"lost")(conn)
        raise UsageError("the caller's fault")

    return transition


class _FullDisk:
    """A segment file whose disk fills up in the middle of a body."""

    def __init__(self, file: object) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])  # type: ignore[attr-defined]
        self._file.flush()  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")


def test_torn_write_costs_no_later_body(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    first = segments.append(b"first")
    segments.sync()
    segments._file = _FullDisk(segments._file)  # type: ignore[assignment]
    with pytest.raises(LocalError, match="No space left"):
        segments.append(b"torn")
    second = segments.append(b"second")
    segments.sync()
    segments.close()
    again = Segments(tmp_path)
    assert (again.read(first), again.read(second)) == (b"first", b"second")


def test_no_row_points_to_a_body_that_may_be_lost(store: LedgerStore) -> None:
    """A call appends a body; the next call of the same commit meets a full disk: the first body is not synced."""

    def commit() -> None:
        with store.transaction() as conn:
            write(store, "first", b"first")(conn)
            store.segments._file = _FullDisk(store.segments._file)  # type: ignore[assignment]
            with pytest.raises(LocalError), conn.begin_nested():
                write(store, "second", b"second")(conn)

    with pytest.raises(LocalError, match="try again"):
        commit()
    assert sources(store) == []
    with store.transaction() as conn:
        place = write(store, "third", b"third")(conn)
    assert place is not None
    assert store.segments.read(place) == b"third"


# -- what the ledger keeps in memory


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path), shared_commits=True)
    yield made
    check_rows(dump(made.store))
    made.ledger.close()


def test_measurements_of_a_failing_commit_count_once_at_last(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    leases = game.lease(session, 3)
    results = [sample(one, ZERO, one.job.index % 2) for one in leases]
    game.source_s += 10
    rates = game.ledger._rates
    before = rates.estimates(), rates.terms(("sums", ""), 16)

    def fail(point: str) -> None:
        if point == "before commit" and dump_in(game.store, "results"):
            raise OSError("the disk is full")

    game.store.boundary = fail
    for _ in range(3):
        with pytest.raises(OSError):
            game.ledger.results(session, results, last_token)
    assert (rates.estimates(), rates.terms(("sums", ""), 16)) == before
    game.store.boundary = lambda _: None
    assert {one.verdict for one in game.ledger.results(session, results, last_token)} == {"accepted"}
    assert set(rates.estimates().values()) == {3 * 2 / 10}


def dump_in(store: LedgerStore, table: str) -> int:
    """Rows of the running transaction."""
    return int(store.connection.scalar(select(func.count()).select_from(db.metadata.tables[table])) or 0)


def test_version_of_a_failing_commit_is_not_known(game: Game) -> None:
    def fail(point: str) -> None:
        if point == "before commit":
            raise OSError("the disk is full")

    game.store.boundary = fail
    game.step = 1
    with pytest.raises(OSError):
        game.publish()
    game.store.boundary = lambda _: None
    assert game.ledger.status()["versions"] == 1
    game.publish()
    assert game.ledger.status()["versions"] == 2


def test_many_threads_at_one_ledger_lose_and_double_nothing(game: Game) -> None:
    sessions = [game.join(str(n)) for n in range(THREADS)]
    game.add(8)

    def work(session: bytes) -> int:
        count = 0
        for _ in range(CALLS):
            leases = game.lease(session, 2)
            results = [sample(one, ZERO, one.job.index % 2) for one in leases]
            count += len(results)
            for _ in range(2):
                assert all(one.verdict == "accepted" for one in game.ledger.results(session, results, last_token))
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        done = sum(threads.map(work, sessions))
    assert done == game.ledger.status()["results"]["accepted"] == 8 * 3


def test_call_whose_transaction_does_not_begin_fails_at_once(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, began = shared(store), store.transaction

    @contextlib.contextmanager
    def no_transaction() -> Iterator[Connection]:
        raise LocalError("the connection is lost")
        yield

    monkeypatch.setattr(store, "transaction", no_transaction)
    with pytest.raises(LocalError, match="the connection is lost"):
        commits.call(write(store, "lost"))
    monkeypatch.setattr(store, "transaction", began)
    commits.call(write(store, "kept"))
    commits.close()
    assert sources(store) == ["kept"]
