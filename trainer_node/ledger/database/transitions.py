"""Transitions of the ledger, each in a transaction at the ledger's present, and reads beside them.

Guarantee: a transition that fails changes nothing, in the rows or in memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from sqlalchemy import Connection, select, update

from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.database.shared_transactions import SharedTransactions
from trainer_node.ledger.lease_time import RECORD_S, LedgerClock
from trainer_node.ledger.ledger_rows import Present, PresentReader

T = TypeVar("T")


class Measurements(Protocol):
    """Kept in memory, and counted once their transaction is committed; see ``trainer_node.ledger.worker_rates``."""

    def mark(self) -> int:
        """The place that ``undo`` goes back to."""

    def undo(self, mark: int) -> None: ...
    def keep(self) -> None: ...


class Transitions:
    """``now``: seconds from any origin. ``happened``: called in the caller's thread after each commit of a transition
    that did something to tell of. ``start`` comes first.
    """

    def __init__(
        self,
        store: LedgerStore,
        measured: Measurements,
        now: Callable[[], float],
        happened: Callable[[Counter[tuple[str, ...]]], object],
    ) -> None:
        self._store = store
        self._measured = measured
        self._happened = happened
        self._present = PresentReader()
        self.newest: Present | None = None
        """As of the newest transition, which may be undone: for guesses alone."""
        self._commits: SharedTransactions | None = None
        self._source, self._clock = now, LedgerClock(now, 0.0)
        self._clock_turn = threading.Lock()
        """Reads ask for the time beside the writer."""

    def start(self, first: Callable[[Connection, Present], T], *, shared_commits: bool) -> T:
        """The first transition, at the time that earlier processes ran. ``shared_commits``: from then on calls of
        several threads share commits; otherwise one thread at a time may call.
        """
        with self._transaction() as conn:
            self._clock = LedgerClock(self._source, conn.scalars(select(db.meta.c.ran_s)).one())
            found = first(conn, self._present.read(conn, self._now_s()))
        if shared_commits:
            self._commits = SharedTransactions(self._transaction, self._store.note_failure)
        return found

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._store.transaction() as conn:
                yield conn
        except BaseException:
            self._undo(0)
            raise
        self._measured.keep()

    def call(self, transition: Callable[[Connection], T], *, urgent: bool = False) -> T:
        """Run a transition that does not need the present."""

        def undone_on_failure(conn: Connection) -> T:
            mark = self._measured.mark()
            try:
                return transition(conn)
            except BaseException:
                self._undo(mark)
                raise

        if self._commits is not None:
            return self._commits.call(undone_on_failure, urgent=urgent)
        with self._transaction() as conn:
            return undone_on_failure(conn)

    def at_present(self, transition: Callable[[Connection, Present], T], *, urgent: bool = False) -> T:
        presents = []

        def at_present(conn: Connection) -> T:
            self.newest = now = self._present.read(conn, self._now_s())
            presents.append(now)
            if now.now_s - now.recorded_s >= RECORD_S:
                conn.execute(update(db.meta).values(ran_s=now.now_s))
            return transition(conn, now)

        found = self.call(at_present, urgent=urgent)
        if happened := presents[-1].happened:
            self._happened(happened)
        return found

    def changing_versions(self, transition: Callable[[Connection, Present], T]) -> T:
        """Run a transition that changes versions or branches, which are then read again."""

        def forgetting(conn: Connection, now: Present) -> T:
            self._present.forget()
            return transition(conn, now)

        return self.at_present(forgetting)

    def read(self, look: Callable[[Connection, Present], T]) -> T:
        """Read the rows as of the newest commit, concurrently with transitions."""
        with self._store.reading() as conn:
            return look(conn, PresentReader().read(conn, self._now_s()))

    def close(self) -> None:
        if self._commits is not None:
            self._commits.close()

    def _now_s(self) -> float:
        with self._clock_turn:
            return self._clock.now_s()

    def _undo(self, mark: int) -> None:
        """Restore the in-memory state after a failed transition or transaction."""
        self._measured.undo(mark)
        self._present.forget()
