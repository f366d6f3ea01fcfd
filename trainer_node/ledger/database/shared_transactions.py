"""Transitions that arrive close together share one commit. One thread writes.

Guarantees: a call returns after the commit that holds its changes. A call that raises changes nothing, and does not
disturb the calls that share its commit. If the commit fails, every call of it raises. Urgent calls come first, and a
commit with an urgent call takes no further ordinary one. A commit takes no further call after COMMIT_S, so an urgent
call waits about so long for the calls before it. While urgent calls come without end, each commit has one ordinary
call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from sqlalchemy import Connection

from p2pcast.ground.errors import LocalError
from trainer_node.ledger.database.ledger_store import database_errors

SHARE_S = 0.005
"""Seconds that a commit waits for further calls."""
COMMIT_S = 0.03
"""Seconds after which a commit takes no further call: a call with 32 results takes as long."""
QUEUED_CALLS = 4096
CALL_S = 60.0

T = TypeVar("T")
_Call = tuple[Callable[[Connection], Any], "Future[Any]"]


class SharedTransactions:
    """``transaction``: begins one, and commits it at the end of its block. ``failed``: called with the error of a call
    that was taken out of its transaction. ``call_s``: seconds after which a caller stops waiting.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Connection]],
        failed: Callable[[BaseException], object],
        *,
        call_s: float = CALL_S,
    ) -> None:
        self._transaction, self._failed = transaction, failed
        self._call_s = call_s
        self._urgent, self._ordinary = deque[_Call](), deque[_Call]()
        self._arrived = threading.Semaphore(0)
        """One for each waiting call, and one for the end."""
        self._closing, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def call(self, transition: Callable[[Connection], T], *, urgent: bool = False) -> T:
        """Run the transition. Raises LocalError if it was not started: it changed nothing and never will."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise LocalError("the ledger is closing: try again later")
            if self.waiting >= QUEUED_CALLS:
                raise LocalError(f"{QUEUED_CALLS} transitions wait for the database: try again later")
            (self._urgent if urgent else self._ordinary).append((transition, future))
            self._arrived.release()
        try:
            return self._answer(future)
        except TimeoutError as error:
            if future.done():
                raise
            raise LocalError("the database does not answer: repeat the call, which may have had its effect") from error

    @property
    def waiting(self) -> int:
        """Return the number of calls that no commit has taken yet."""
        return len(self._urgent) + len(self._ordinary)

    def _answer(self, future: Future[T]) -> T:
        try:
            return future.result(self._call_s)
        except TimeoutError:
            if future.cancel():
                raise LocalError(f"the database is behind by {self._call_s:.0f} s: try again later") from None
            return future.result(self._call_s)  # begun: its commit alone says whether it changed anything

    def close(self) -> None:
        """Commit the calls made so far; later calls raise LocalError."""
        with self._closing:
            first, self._closed = not self._closed, True
        if first:
            self._arrived.release()
        self._thread.join()

    def _run(self) -> None:
        urgent = False
        while True:
            self._arrived.acquire()
            # After urgent calls an ordinary one: a worker that asks for leases without end must not stop the run.
            queues = (self._ordinary, self._urgent) if urgent else (self._urgent, self._ordinary)
            waiting = next(filter(None, queues), None)
            if waiting is None:
                return
            urgent, first = waiting is self._urgent, waiting.popleft()
            if not self.waiting:
                time.sleep(SHARE_S)
            urgent = self._commit(first, urgent=urgent)

    def _commit(self, first: _Call, *, urgent: bool) -> bool:
        """Run the first call, and more until COMMIT_S have passed. Returns whether any of them was urgent."""
        calls = [first] if first[1].set_running_or_notify_cancel() else []
        done: list[tuple[Any, BaseException | None]] = []
        until_s = time.monotonic() + COMMIT_S
        try:
            with self._transaction() as conn:
                # Without a savepoint: no other call shares the transaction if this one fails.
                done += [(transition(conn), None) for transition, _ in calls]
                while time.monotonic() <= until_s and (self._urgent or (self._ordinary and not urgent)):
                    urgent = bool(self._urgent)
                    self._arrived.acquire()
                    call = (self._urgent if urgent else self._ordinary).popleft()
                    if call[1].set_running_or_notify_cancel():
                        calls.append(call)
                        done.append(self._outcome(conn, call[0]))
        except BaseException as error:  # noqa: BLE001 - every caller learns of it
            done = [(None, error) for _ in calls]
        for (_, future), (value, failure) in zip(calls, done, strict=True):
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)
        return urgent

    def _outcome(self, conn: Connection, transition: Callable[[Connection], Any]) -> tuple[Any, BaseException | None]:
        try:
            with database_errors(), conn.begin_nested():
                return transition(conn), None
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._failed(error)
            return None, error
