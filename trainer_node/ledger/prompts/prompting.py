"""Transitions of the task's prompts: which of them were passed on, as rows.

Guarantees: the groups that are made from prompts and the cursor behind these prompts are one transaction. So each
prompt is passed on once, over restarts too. A seed of a task has a cursor of its own, which no other group moves.
Values that hooks keep are written with the cursor. The rewards of a group count for its prompt's history once, when the
group has ended; histories are the newest KEPT_HISTORIES.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from p2pcast.ground.errors import RefusedError
from p2pcast.rollouts.job import Group
from trainer_node.ledger import job_groups
from trainer_node.ledger.audits.replaying import DUE
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import Present, in_parts

MAX_HISTORY = 16
"""Groups in a prompt's history."""
KEPT_HISTORIES = 65536
"""Prompts whose histories stay."""
ENDED = ("complete", "short", "trained", "dropped")


class PromptPosition(NamedTuple):
    """``cursor``: prompts that were passed on. ``waiting``: groups to train in the pool, whatever their origin."""

    cursor: int
    waiting: int


@dataclass(frozen=True, slots=True)
class PassedPrompts:
    """Prompts from ``start`` up to ``end``, and the groups made from them. ``ended``: no prompts follow. ``hooks``:
    those that chose the groups. ``state``: the texts of their values that changed, None for a value that was deleted.
    ``sources``: for each group by its id, the prompt's name for messages.
    """

    start: int
    end: int
    groups: Sequence[Group]
    ended: bool = False
    hooks: str | None = None
    state: Mapping[str, str | None] = field(default_factory=dict)
    sources: Mapping[bytes, str] = field(default_factory=dict)


def position(conn: Connection, task_hash: bytes, seed: int) -> PromptPosition:
    cursor = conn.scalar(select(db.prompt_sources.c.cursor).where(*_is(task_hash, seed)))
    return PromptPosition(int(cursor or 0), job_groups.waiting(conn, task_hash))


def add(conn: Connection, now: Present, task_hash: bytes, seed: int, passed: PassedPrompts) -> None:
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
        job_groups.add_groups(conn, now, task_hash, passed.groups, history=passed.hooks is not None)
        _write_sources(conn, passed.sources)
    if passed.hooks is not None and passed.state:
        _write_state(conn, task_hash, seed, passed.hooks, passed.state)
    values = {"cursor": passed.end, "ended": passed.ended}
    if known is None:
        conn.execute(insert(db.prompt_sources).values(task_hash=task_hash, seed=seed, **values))
    else:
        conn.execute(update(db.prompt_sources).where(*which).values(**values))


def state_of(conn: Connection, task_hash: bytes, seed: int, hooks: str) -> dict[str, str]:
    """Texts of the hooks' values, by name."""
    rows = conn.execute(select(db.hook_state.c.name, db.hook_state.c.value).where(*_of(task_hash, seed, hooks)))
    return {row.name: row.value for row in rows}


def _write_sources(conn: Connection, sources: Mapping[bytes, str]) -> None:
    table = db.group_sources
    # A trainer may have added the same groups before.
    known = {bytes(one) for one in conn.scalars(select(table.c.group_id).where(table.c.group_id.in_(list(sources))))}
    if rows := [{"group_id": one, "source": source} for one, source in sources.items() if one not in known]:
        conn.execute(insert(table), rows)


def _write_state(conn: Connection, task_hash: bytes, seed: int, hooks: str, state: Mapping[str, str | None]) -> None:
    conn.execute(delete(db.hook_state).where(*_of(task_hash, seed, hooks), db.hook_state.c.name.in_(list(state))))
    which = {"task_hash": task_hash, "seed": seed, "hooks": hooks}
    rows = [which | {"name": name, "value": value} for name, value in state.items() if value is not None]
    if rows:
        conn.execute(insert(db.hook_state), rows)


def histories(conn: Connection, task_hash: bytes, prompts: Sequence[bytes]) -> list[list[float]]:
    """For each prompt the mean rewards of its newest groups that have ended, oldest first."""
    gather(conn)
    hashes = [job_groups.prompt_hash(prompt) for prompt in prompts]
    known = _means(conn, task_hash, hashes)
    return [known.get(prompt, []) for prompt in hashes]


def gather(conn: Connection) -> None:
    """Enter the rewards of groups that have ended into the histories of their prompts."""
    ended = db.groups.c.history_of.is_not(None) & db.groups.c.state.in_(ENDED)
    replayed = select(db.jobs.c.group_id).join(db.results, db.results.c.job_id == db.jobs.c.id)
    groups = conn.execute(
        select(db.groups.c.id, db.groups.c.task_hash, db.groups.c.history_of, db.groups.c.added)
        .where(ended, db.groups.c.id.not_in(replayed.where(db.results.c.replay == DUE)))
        .order_by(db.groups.c.added)
    ).all()
    for part in in_parts(groups):
        rewards: dict[bytes, list[float]] = {}
        accepted = (
            select(db.jobs.c.group_id, db.results.c.reward)
            .join(db.results, db.results.c.job_id == db.jobs.c.id)
            .where(db.jobs.c.group_id.in_([row.id for row in part]), db.results.c.verdict == "accepted")
        )
        for one in conn.execute(accepted):
            rewards.setdefault(bytes(one.group_id), []).append(one.reward)
        for row in part:
            if found := rewards.get(bytes(row.id)):
                _enter(conn, bytes(row.task_hash), bytes(row.history_of), fmean(found), row.added)
        counted = db.groups.c.id.in_([row.id for row in part])
        conn.execute(update(db.groups).where(counted).values(history_of=None))


def _enter(conn: Connection, task_hash: bytes, prompt: bytes, mean: float, added: int) -> None:
    which = (db.prompt_history.c.task_hash == task_hash, db.prompt_history.c.prompt == prompt)
    before = _means(conn, task_hash, [prompt]).get(prompt)
    values = {"means": json.dumps([*(before or []), mean][-MAX_HISTORY:]), "added": added}
    if before is None:
        conn.execute(insert(db.prompt_history).values(task_hash=task_hash, prompt=prompt, **values))
    else:
        conn.execute(update(db.prompt_history).where(*which).values(**values))


def _means(conn: Connection, task_hash: bytes, hashes: Sequence[bytes]) -> dict[bytes, list[float]]:
    table = db.prompt_history
    rows = conn.execute(
        select(table.c.prompt, table.c.means).where(table.c.task_hash == task_hash, table.c.prompt.in_(hashes))
    )
    return {bytes(row.prompt): json.loads(row.means) for row in rows}


def prune(conn: Connection) -> None:
    """Before groups are deleted: their rewards are entered first."""
    gather(conn)
    table = db.prompt_history
    oldest = conn.scalar(select(table.c.added).order_by(table.c.added.desc()).offset(KEPT_HISTORIES).limit(1))
    if oldest is not None:
        conn.execute(delete(table).where(table.c.added <= oldest))


def _of(task_hash: bytes, seed: int, hooks: str) -> tuple[ColumnElement[bool], ...]:
    table = db.hook_state
    return table.c.task_hash == task_hash, table.c.seed == seed, table.c.hooks == hooks


def _is(task_hash: bytes, seed: int) -> tuple[ColumnElement[bool], ...]:
    return db.prompt_sources.c.task_hash == task_hash, db.prompt_sources.c.seed == seed
