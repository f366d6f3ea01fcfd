"""Transitions of the task's prompts: which of them were passed on, as rows.

Promises: the groups that are made from prompts and the cursor behind these prompts are one transaction. So each prompt
is passed on once, over restarts too. A seed of a task has a cursor of its own, which no other group moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, insert, select, update

from p2pcast.errors import RefusedError
from p2pcast.rollouts.job import Group
from trainer_node.ledger import group_pool
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import Present


class Position(NamedTuple):
    """``cursor``: prompts that were passed on. ``waiting``: groups to train in the pool, whatever their origin."""

    cursor: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Prompts from ``start`` up to ``end``, and the groups made from them. ``ended``: no prompts follow."""

    start: int
    end: int
    groups: Sequence[Group]
    ended: bool = False


def position(conn: Connection, task_hash: bytes, seed: int) -> Position:
    cursor = conn.scalar(select(db.prompt_sources.c.cursor).where(*_is(task_hash, seed)))
    return Position(int(cursor or 0), group_pool.waiting(conn, task_hash))


def add(conn: Connection, now: Present, task_hash: bytes, seed: int, passed: Passed) -> None:
    """Repeated after its commit, changes nothing. Raises as ``add_groups``, and RefusedError for prompts that do not
    begin at the cursor.
    """
    which = _is(task_hash, seed)
    known = conn.scalar(select(db.prompt_sources.c.cursor).where(*which))
    cursor = int(known or 0)
    if cursor == passed.end and passed.start < passed.end:
        return
    if cursor != passed.start:
        raise RefusedError(f"prompts {passed.start} to {passed.end} of seed {seed}: the cursor is at {cursor}")
    if passed.groups:
        group_pool.add_groups(conn, now, task_hash, passed.groups)
    values = {"cursor": passed.end, "ended": passed.ended}
    if known is None:
        conn.execute(insert(db.prompt_sources).values(task_hash=task_hash, seed=seed, **values))
    else:
        conn.execute(update(db.prompt_sources).where(*which).values(**values))


def _is(task_hash: bytes, seed: int) -> tuple[ColumnElement[bool], ...]:
    return db.prompt_sources.c.task_hash == task_hash, db.prompt_sources.c.seed == seed
