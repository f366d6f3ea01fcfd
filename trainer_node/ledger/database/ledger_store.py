"""The ledger's database: SQLite in a folder, or PostgreSQL by URL, with one connection that writes and a few that read.

Guarantees: ``transaction`` commits all of a call or nothing; bodies that the call appended are on disk before its rows
are. ``boundary`` is called at each point where a crash would leave another state: tests raise there. ``reading`` shows
the rows as of one commit, waits for no transaction, and holds none up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, select
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.process.shortages import shortage
from trainer_node.ledger.database.body_segments import SEGMENT_BYTES, Segments
from trainer_node.ledger.database.ledger_schema import SCHEMA, meta, metadata

Boundary = Callable[[str], None]
SQLITE = "ledger.db"
CONNECT_S = 10
"""Seconds after which an attempt to reach PostgreSQL has failed, unless the URL names others."""
READERS = 4
"""Connections that read. Further calls wait for their turn."""
WRITER_LOCK = 0x70327063
"""Key of the PostgreSQL advisory lock that the one writer holds."""


def _no_boundary(_: str) -> None:
    return None


def _no_short(_: str, __: BaseException) -> None:
    return None


class LedgerStore:
    """``folder``: of segment files, and of the SQLite database unless ``database``, a URL, names another.

    ``ran_short``: called in the thread of a write that failed, with the shortage of the machine and the error.
    """

    def __init__(
        self,
        folder: Path,
        database: str | None = None,
        *,
        boundary: Boundary = _no_boundary,
        segment_bytes: int = SEGMENT_BYTES,
        ran_short: Callable[[str, BaseException], object] = _no_short,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _locked(folder)
        url = url_of(folder, database)
        self._engine = create_engine(url, **_options(url))
        self._readers = readers_of(url)
        if self._engine.dialect.name == "sqlite":
            _prepare_sqlite(self._engine, "synchronous=FULL", "BEGIN IMMEDIATE")
            _prepare_sqlite(self._readers, "query_only=ON", "BEGIN")
        else:
            _own_postgresql(self._engine)
        self.boundary = boundary
        self.short: str | None = None
        """The shortage of the machine when a write failed; None again once ``check_room`` has succeeded."""
        self._ran_short = ran_short
        try:
            self.connection: Connection = self._engine.connect()
            self._create()
        except OperationalError as error:
            self._engine.dispose()
            os.close(self._lock_fd)
            raise UsageError(f"the ledger's database cannot be opened: {error.orig}") from None
        except BaseException:
            self._engine.dispose()
            os.close(self._lock_fd)
            raise
        self.segments = Segments(folder / "bodies", segment_bytes)

    def _create(self) -> None:
        with self.connection.begin():
            metadata.create_all(self.connection)
            found = self.connection.scalar(select(meta.c.schema))
            if found is None:
                zero = dict.fromkeys(("epoch", "branch", "step", "added", "opened"), 0) | {"ran_s": 0.0}
                self.connection.execute(insert(meta), {"id": 1, "schema": SCHEMA, **zero})
        if found not in (None, SCHEMA):
            raise UsageError(f"the ledger's tables have version {found}, and this release reads version {SCHEMA}")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        try:
            with database_errors(), self.connection.begin():
                yield self.connection
                self.boundary("before fsync")
                self.segments.sync()
                self.boundary("before commit")
        except BaseException as error:
            self.segments.rolled_back()
            self.note_failure(error)
            raise
        self.boundary("after commit")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Context manager for a read-only connection that sees the rows as of the newest commit. Thread-safe."""
        with database_errors(), self._readers.connect() as connection, connection.begin():
            yield connection

    def note_failure(self, error: BaseException) -> None:
        """Record that a transaction, or one of its calls, failed to write."""
        if (short := shortage(error)) is not None:
            self.short = short
            self._ran_short(short, error)

    def close(self) -> None:
        self.segments.close()
        self.connection.close()
        self._engine.dispose()
        self._readers.dispose()
        os.close(self._lock_fd)


@contextmanager
def database_errors() -> Iterator[None]:
    """Context manager that converts the driver's errors to LocalError."""
    try:
        yield
    except (DBAPIError, PendingRollbackError, PoolTimeoutError) as error:
        if isinstance(error, PoolTimeoutError):
            raise LocalError("the ledger's database does not answer: repeat the call") from None
        said = str(error.orig if isinstance(error, DBAPIError) else "the connection is lost").strip().partition("\n")[0]
        raise LocalError(f"the ledger's database failed ({said}): repeat the call, then check the database") from error


def _own_postgresql(engine: Any) -> None:
    """Each new connection, including a reconnection, raises LocalError if another ledger is writing. That may be this
    ledger's own lost connection if the server has not noticed its loss.
    """

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        locked = connection.execute(f"SELECT pg_try_advisory_lock({WRITER_LOCK})").fetchone()[0]
        connection.commit()
        if not locked:
            connection.close()
            raise LocalError("another ledger writes to this database: end it first")


def _locked(folder: Path) -> int:
    """Lock the folder and return its descriptor. Raises UsageError if another ledger writes to the folder."""
    lock_fd = os.open(folder / "ledger.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise UsageError(f"another ledger writes to {folder}: end it first") from None
    return lock_fd


def url_of(folder: Path, database: str | None) -> str:
    """Return SQLAlchemy's URL of the database. Raises UsageError."""
    return f"sqlite:///{folder / SQLITE}" if database is None else _with_driver(database)


def _with_driver(url: str) -> str:
    """Return SQLAlchemy's URL, with psycopg 3 as PostgreSQL's driver."""
    scheme, found, rest = url.partition("://")
    if not found or scheme not in ("postgresql", "postgresql+psycopg", "sqlite"):
        raise UsageError(f"--database: postgresql://… is expected, not {scheme}")
    return f"postgresql+psycopg://{rest}" if scheme == "postgresql" else url


def _options(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        # The thread that writes is not the one that opens the database.
        return {"connect_args": {"check_same_thread": False}}
    return {} if "connect_timeout" in url else {"connect_args": {"connect_timeout": CONNECT_S}}


def readers_of(url: str) -> Engine:
    """Return an engine whose transactions are read-only and each see one commit."""
    made = create_engine(url, **_options(url), pool_size=READERS, max_overflow=0)
    if made.dialect.name == "postgresql":
        return made.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return made


def _prepare_sqlite(engine: Engine, pragma: str, begin: str) -> None:
    """``pragma``: run on each connection after the common ones. ``begin``: the first statement of a transaction."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        # Without this the driver begins transactions itself, late and without savepoints.
        connection.isolation_level = None
        for one in ("busy_timeout=5000", "journal_mode=WAL", "foreign_keys=ON", pragma):
            connection.execute(f"PRAGMA {one}").close()

    @event.listens_for(engine, "begin")
    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
