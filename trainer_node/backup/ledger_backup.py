"""Backs up a ledger's state while the ledger works.

The rows are copied as of one commit, followed by the results' bytes. Bytes are on disk before the row that points to
them is committed, and segment files are append-only. So segments that are copied after the rows contain everything that
the rows point to, unless retention has removed a segment meanwhile; the rows are then copied again.

A restored ledger is behind the learner if the learner has written a checkpoint since the backup. ``advance`` then moves
the ledger to the learner's step. Which groups the learner has trained since is not known here, so none of the backup's
groups is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, select, update

from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_folder, explained
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.store.state_format import check as check_format
from trainer_node.backup.backup_folder import LEDGER, Backup, copy_file, restore_files, top_files
from trainer_node.backup.row_copy import facts, restore_rows, snapshot
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import SQLITE, LedgerStore
from trainer_node.ledger.job_groups import drop
from trainer_node.ledger.ledger_rows import Present, PresentReader
from trainer_node.ledger.ledger_states import LIVE_GROUPS

MADE_ANEW = ("daemon.json", "ledger.lock", "lock", SQLITE, f"{SQLITE}-wal", f"{SQLITE}-shm", f"{SQLITE}-journal")
PASSES = 20
LOST = "restored from a backup"
"""Why a group that the learner may have trained after the backup is dropped."""


def copy_ledger(state: Path, to: Path, database: str | None) -> dict[str, Any]:
    """Copy the ledger's state, and return the facts for the backup's document. Raises LocalError or UsageError."""
    check_format(state)
    if not (state / "http.key").is_file():
        raise UsageError(f"{state} is not the state folder of a ledger: it has no http.key")
    with explained("create", to / "bodies"):
        disk.make_folder(to / "bodies")
    for _ in range(PASSES):
        snapshot(state, database, to / SQLITE)
        found, used = facts(to / SQLITE)
        if _copy_segments(state / "bodies", to / "bodies", used):
            break
    else:
        raise LocalError(f"{state}: results are removed faster than they can be copied: stop the ledger for the backup")
    for path in top_files(state, MADE_ANEW):
        copy_file(path, to / path.name)
    return {"run": _run(to / "ledger.json"), "database": "sqlite" if database is None else "postgresql", **found}


def _copy_segments(bodies: Path, to: Path, used: set[int]) -> bool:
    """Copy the segments that rows point to. Returns False if one of them is gone."""
    for path in to.glob("*.seg"):
        if int(path.stem) not in used:
            path.unlink()
    return all(copy_file(bodies / f"{number}.seg", to / f"{number}.seg", grow=True) for number in sorted(used))


def _run(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())["run"]
    except (ValueError, KeyError, TypeError):
        raise LocalError(f"{path} is damaged: restore it from a copy") from None
    return None if found is None else str(found)


def restore_ledger(backup: Backup, state: Path, step: int, database: str | None) -> int:
    """Write the ledger's state to a new folder, and its rows to ``database`` if one is given. ``step``: the step of the
    learner's newest checkpoint, or 0 if there is none. Returns the number of groups that were dropped. Raises
    LocalError or UsageError.
    """
    with atomic_folder(state) as part:
        restore_files(backup, LEDGER, part)
        disk.make_folder(part / "bodies")
        if database is not None:
            restore_rows(part / SQLITE, database)
            (part / SQLITE).unlink()
        store = LedgerStore(part, database)
        try:
            with store.transaction() as conn:
                dropped = advance(conn, PresentReader().read(conn, 0.0), step)
        finally:
            store.close()
        return dropped


def advance(conn: Connection, now: Present, step: int) -> int:
    """Move the ledger to a learner's checkpoint of ``step`` steps, if that is beyond the ledger's own step. Batches
    that no checkpoint was known to contain are deleted, and all groups that are yet to be trained are dropped, because
    the checkpoint may contain any of them. Returns the number of dropped groups.
    """
    if step <= now.step:
        return 0
    batches = conn.scalars(select(db.batches.c.id).where(db.batches.c.state.in_(("cut", "applied")))).all()
    conn.execute(delete(db.batch_members).where(db.batch_members.c.batch_id.in_(batches)))
    conn.execute(delete(db.batches).where(db.batches.c.id.in_(batches)))
    live = db.groups.c.state.in_(("waiting", *LIVE_GROUPS)) & (db.groups.c.purpose == "train")
    groups = conn.scalars(select(db.groups.c.id).where(live)).all()
    for group in groups:
        drop(conn, now, bytes(group), LOST)
    conn.execute(update(db.meta).values(step=step))
    return len(groups)
