"""Copies the ledger's rows as of one commit, while the ledger writes. A copy is an SQLite database with the tables of
``ledger_schema``, even if the rows are in PostgreSQL. So a backup does not need PostgreSQL's own programs, and can be
restored to either database.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, create_engine, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError, UsageError
from trainer_node.ledger.database.ledger_schema import SCHEMA, meta, metadata, results
from trainer_node.ledger.database.ledger_store import SQLITE, database_errors, readers_of, url_of

ROWS = 1000
"""Number of rows that are read and written at a time."""


def snapshot(state: Path, database: str | None, to: Path) -> None:
    """Write the rows to the new file ``to``. Raises LocalError, UsageError."""
    disk.unlink(to, missing_ok=True)
    if database is None:
        _backup_sqlite(state / SQLITE, to)
        return
    source = readers_of(url_of(state, database))
    try:
        with database_errors(), source.connect() as rows, rows.begin():
            if not inspect(rows).has_table(meta.name) or rows.scalar(select(meta.c.schema)) != SCHEMA:
                raise UsageError(f"--database has no ledger's tables of version {SCHEMA}, which this release reads")
            target = create_engine(f"sqlite:///{to}")
            with target.begin() as made:
                metadata.create_all(made)
                copy_rows(rows, made)
            target.dispose()
    finally:
        source.dispose()


def _backup_sqlite(database: Path, to: Path) -> None:
    if not database.is_file():
        raise UsageError(f"{database.parent} has no {database.name}: name the ledger's PostgreSQL by --database")
    try:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(to)) as target:
            source.backup(target)
    except sqlite3.Error as error:
        raise LocalError(f"cannot copy {database} to {to}: {error}") from error


def restore_rows(copied: Path, database: str) -> None:
    """Write the rows of a copy to an empty PostgreSQL database. Raises LocalError, UsageError."""
    source = create_engine(f"sqlite:///{copied}")
    target = create_engine(url_of(copied.parent, database))
    try:
        with database_errors(), source.connect() as rows, target.begin() as made:
            if rows.scalar(select(meta.c.schema)) != SCHEMA:
                raise UsageError(f"{copied} is not of version {SCHEMA} of the tables, which this release reads")
            if inspect(made).has_table(meta.name):
                raise UsageError("--database has a ledger's tables already: name an empty database")
            metadata.create_all(made)
            copy_rows(rows, made)
    finally:
        source.dispose()
        target.dispose()


def copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows of all tables to ``target``, whose tables are empty. ``source`` may not have a table that this
    release added, until a ledger of this release opens it.
    """
    held = set(inspect(source).get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in held:
            continue
        found = source.execute(select(table), execution_options={"yield_per": ROWS})
        for part in found.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in part])


def facts(copied: Path) -> tuple[dict[str, int], set[int]]:
    """Epoch, branch and step of a copy, and the numbers of the segments that its rows point to. Raises LocalError."""
    engine = create_engine(f"sqlite:///{copied}")
    try:
        with engine.connect() as rows:
            row = rows.execute(select(meta.c.schema, meta.c.epoch, meta.c.branch, meta.c.step)).one()
            used = rows.scalars(select(results.c.segment).where(results.c.segment.is_not(None)).distinct())
            return dict(row._mapping), set(used)
    except DBAPIError as error:
        raise LocalError(f"{copied} cannot be read: {error.orig}") from error
    finally:
        engine.dispose()
