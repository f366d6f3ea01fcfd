"""Transitions of groups: added, opened by the pace rule, ended."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import blake3
from sqlalchemy import Connection, Row, Select, bindparam, func, insert, select, update

from p2pcast.ground.errors import RefusedError, RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.rollouts.job import Group
from trainer_node.ledger.batch_cut import LEAST_SURVIVORS
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import (
    MAX_EVALUATIONS,
    MAX_WAITING,
    CapReachedError,
    Present,
    ahead,
    in_parts,
    live_batch_groups,
    move,
    move_all,
)
from trainer_node.ledger.ledger_states import LIVE_GROUPS, UNSETTLED_JOBS
from trainer_node.ledger.staleness_rule import StalenessBounds, room

logger = logging.getLogger("p2pcast.ledger")

FOREIGN = "another task"
"""Why a group is dropped that no worker of the run may play."""
UNPLAYABLE = "unplayable prompt"
"""Why a group is dropped of which a job was rejected and none has an accepted result."""
UNREADABLE = "unreadable"
"""Why a group is dropped that an earlier release took, though no worker can read it."""
NOT_PLAYED = (FOREIGN, UNPLAYABLE, UNREADABLE)
"""Reasons that say nothing of rewards: such a group does not count as played for a batch."""


def add_groups(
    conn: Connection, now: Present, task_hash: bytes, added: Sequence[Group], *, history: bool = False
) -> int:
    """Put groups into the pool; returns how many are new. ``history``: their rewards are kept by prompt. A group
    that is there already is not added again. Raises RefusedError if another group has the id, or for a group of another
    task.
    """
    if len(added) > MAX_LIST:
        raise UsageError(f"{len(added)} groups in one request, and {MAX_LIST} are allowed")
    for purpose, most in (("train", MAX_WAITING), ("evaluate", MAX_EVALUATIONS)):
        waiting = (db.groups.c.state == "waiting") & (db.groups.c.purpose == purpose)
        asked = sum(group.purpose == purpose for group in added)
        if asked and int(conn.scalar(select(func.count()).where(waiting)) or 0) + asked > most:
            raise CapReachedError(f"{most} groups to {purpose} are waiting: add more when some have been opened")
    for group in added:
        _check(group, task_hash)
    number, known = int(conn.scalar(select(db.meta.c.added)) or 0), read_groups(conn, {group.id for group in added})
    rows: list[dict[str, Any]] = []
    for group in added:
        if group.id not in known:
            known[group.id] = group
            prompt = prompt_hash(group.prompt) if history else None
            rows.append(_row(group, number + len(rows) + 1, now) | {"history_of": prompt})
        elif known[group.id] != group:
            raise RefusedError(f"another group has the id {group.id.hex()}")
    if rows:
        conn.execute(insert(db.groups), rows)
        conn.execute(update(db.meta).values(added=number + len(rows)))
    return len(rows)


def prompt_hash(prompt: bytes) -> bytes:
    return blake3.blake3(prompt).digest()


def _row(group: Group, number: int, now: Present) -> dict[str, Any]:
    pinned = group.pinned
    return {
        "id": group.id,
        "added": number,
        "added_step": now.step,
        "state": "waiting",
        "purpose": group.purpose,
        "task_hash": group.task_hash,
        "size": group.size,
        "pinned_branch": None if pinned is None else pinned.branch,
        "pinned_step": None if pinned is None else pinned.step,
        "stale_endings": 0,
        "body": group.to_bytes(),
    }


def _check(group: Group, task_hash: bytes) -> None:
    """Raises UsageError for a group that no worker could read, or that could never end well, and RefusedError for one
    of another task.
    """
    group.check()
    if group.task_hash != task_hash:
        raise RefusedError(
            f"group {group.id.hex()} is of task {group.task} with hash {group.task_hash.hex()[:12]}, and the ledger's"
            f" task has {task_hash.hex()[:12]}: compare code and settings of the task"
        )
    if group.purpose == "evaluate" and group.pinned is None:
        raise UsageError(f"group {group.id.hex()}: a group for evaluation names its version")
    if group.purpose == "evaluate" and group.temperature != 0:
        raise UsageError(f"group {group.id.hex()}: an evaluation is greedy, at temperature 0, not {group.temperature}")
    if group.purpose == "train" and group.size < LEAST_SURVIVORS:
        raise UsageError(f"group {group.id.hex()}: a group to train has at least {LEAST_SURVIVORS} samples")


def enter_task(conn: Connection, now: Present, task_hash: bytes) -> int:
    """Make this task the ledger's own. Drop groups of other tasks that are in no batch of the learner: no worker plays
    them, so they would count against the pace rule for ever. Returns how many were dropped.
    """
    conn.execute(update(db.meta).values(task_hash=task_hash))
    return drop_foreign(conn, now, task_hash)


def drop_foreign(conn: Connection, now: Present, task_hash: bytes) -> int:
    """Drop the groups of other tasks that are in no batch of the learner. Returns how many."""
    live = db.groups.c.state.in_(("waiting", *LIVE_GROUPS)) & (db.groups.c.task_hash != task_hash)
    foreign = conn.scalars(select(db.groups.c.id).where(live, db.groups.c.id.not_in(live_batch_groups))).all()
    for group in foreign:
        drop(conn, now, group, FOREIGN)
    return len(foreign)


def waiting(conn: Connection, task_hash: bytes) -> int:
    """Return the number of the task's training groups that have not been opened."""
    mine = (db.groups.c.task_hash == task_hash) & (db.groups.c.purpose == "train")
    wait = select(func.count()).select_from(db.groups).where(mine, db.groups.c.state == "waiting")
    return int(conn.scalar(wait) or 0)


PINNED = (db.groups.c.pinned_branch == bindparam("branch")) & (db.groups.c.pinned_step == bindparam("step"))
"""Groups that the version with this ``branch`` and ``step`` has to play."""
_EVALUATED = (
    select(db.groups.c.id)
    .where(db.groups.c.state.in_(("waiting", "open")), db.groups.c.purpose == "evaluate", PINNED)
    .limit(1)
)


def is_evaluated(conn: Connection, served: Version) -> bool:
    """Whether evaluation groups for this version are still unfinished."""
    return conn.execute(_EVALUATED, served._asdict()).first() is not None


_WAITING = (
    select(db.groups.c.id, db.groups.c.size)
    .where(
        db.groups.c.state == "waiting",
        db.groups.c.task_hash == bindparam("task_hash"),
        db.groups.c.purpose == bindparam("purpose"),
    )
    .order_by(db.groups.c.added)
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True)
)
_WAITING_FOR_VERSION = _WAITING.where(PINNED)
_COUNT_OPENED = update(db.meta).values(opened=db.meta.c.opened + bindparam("more")).returning(db.meta.c.opened)
_NEW_JOBS = insert(db.jobs)


def open_groups(
    conn: Connection,
    now: Present,
    bounds: StalenessBounds,
    served: Version,
    purpose: str,
    task_hash: bytes,
    new_id: Callable[[], bytes],
    jobs: int,
) -> bool:
    """Open the next groups that an engine with the version ``served`` may play, for ``jobs`` jobs, as far as the pace
    rule allows. Returns whether a group was opened. A group for evaluation needs no room. ``served`` is live if the
    purpose is to train: a dead version may have a higher step than the live ones, and must not make room.
    """
    wanted = {"task_hash": task_hash, "purpose": purpose}
    if purpose == "evaluate":
        rows = _waiting(conn, _WAITING_FOR_VERSION, wanted | served._asdict(), jobs, jobs)
    else:
        rows = _waiting(conn, _WAITING, wanted, jobs, room(bounds, ahead(conn), served.step, now.step))
    if not rows:
        return False
    last = conn.execute(_COUNT_OPENED, {"more": len(rows)}).scalar_one()
    opened = {bytes(row.id): place for place, row in enumerate(rows, start=last - len(rows) + 1)}
    for group_id, place in opened.items():
        move(conn, "group", db.groups, group_id, "open", opened=place)
    fresh = [
        {
            "id": new_id(),
            "group_id": row.id,
            "position": index,
            "opened": opened[bytes(row.id)],
            "purpose": purpose,
            "task_hash": task_hash,
            "state": "open",
            "failures": 0,
        }
        for row in rows
        for index in range(row.size)
    ]
    conn.execute(_NEW_JOBS, fresh)
    return True


def _waiting(conn: Connection, which: Select[Any], wanted: Mapping[str, Any], jobs: int, most: int) -> list[Row[Any]]:
    """Return the first groups, in insertion order, that together have ``jobs`` jobs; at most ``most``."""
    if most < 1:
        return []
    found: list[Row[Any]] = []
    for row in conn.execute(which, {**wanted, "most": min(most, jobs)}).all():
        if sum(one.size for one in found) >= jobs:
            break
        found.append(row)
    return found


_BODIES = select(db.groups.c.id, db.groups.c.body).where(db.groups.c.id.in_(bindparam("ids", expanding=True)))


def read_groups(conn: Connection, group_ids: Collection[bytes]) -> dict[bytes, Group]:
    """Return the records of some groups, by id."""
    return {group_id: Group.from_bytes(body) for group_id, body in _bodies(conn, group_ids)}


def _bodies(conn: Connection, group_ids: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for part in in_parts(group_ids):
        for row in conn.execute(_BODIES, {"ids": part}).all():
            yield bytes(row.id), bytes(row.body)


def playable_groups(conn: Connection, now: Present, group_ids: Collection[bytes]) -> dict[bytes, Group]:
    """Return the records of some open groups, by id. Groups whose records cannot be read are dropped."""
    found: dict[bytes, Group] = {}
    for group_id, body in _bodies(conn, group_ids):
        try:
            found[group_id] = Group.from_bytes(body)
        except RemoteError as error:
            logger.error("group %s is dropped: %s", group_id.hex(), error)
            drop(conn, now, group_id, UNREADABLE)
    return found


_JOBS_BY_STATE = (
    select(db.jobs.c.group_id, db.groups.c.purpose, db.jobs.c.state, func.count().label("jobs"))
    .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
    .where(db.jobs.c.group_id.in_(bindparam("ids", expanding=True)))
    .group_by(db.jobs.c.group_id, db.groups.c.purpose, db.jobs.c.state)
)


def end_settled(conn: Connection, now: Present, group_ids: Collection[bytes]) -> None:
    """Complete, shorten or drop those open groups whose jobs can no longer produce a result."""
    jobs: dict[tuple[bytes, str], Counter[str]] = defaultdict(Counter)
    for row in conn.execute(_JOBS_BY_STATE, {"ids": list(group_ids)}):
        jobs[bytes(row.group_id), row.purpose][row.state] = row.jobs
    ended: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for (group_id, purpose), states in jobs.items():
        if not any(states[state] for state in UNSETTLED_JOBS):
            ended[purpose, _end_of(purpose, states)].append(group_id)
    for (purpose, end), groups in ended.items():
        at = {"ended_epoch": now.epoch, "ended_step": now.step} if purpose == "evaluate" else {}
        if end == "complete":
            move_all(conn, "group", db.groups, groups, end, **at)
            continue
        for group_id in groups:
            if end == "dropped":
                drop(conn, now, group_id, "too few results")
            else:
                move(conn, "group", db.groups, group_id, end, longest=_longest(conn, group_id), **at)


def _end_of(purpose: str, jobs: Counter[str]) -> str:
    """Return the state of a group whose jobs have all ended."""
    if jobs["accepted"] < (1 if purpose == "evaluate" else LEAST_SURVIVORS):
        return "dropped"
    return "complete" if jobs["accepted"] == jobs.total() else "short"


def drop(conn: Connection, now: Present, group_id: bytes, reason: str) -> None:
    """End a group that is never trained: its leases are aborted, its jobs cancelled."""
    ended = {"reason": reason, "ended_epoch": now.epoch, "ended_step": now.step, "longest": _longest(conn, group_id)}
    move(conn, "group", db.groups, group_id, "dropped", **ended)
    _cancel_jobs(conn, group_id, reason)
    now.happened["groups_dropped", reason] += 1


def shorten(conn: Connection, group_id: bytes) -> None:
    """End an open group that is trained with the results it already has."""
    move(conn, "group", db.groups, group_id, "short", longest=_longest(conn, group_id))
    _cancel_jobs(conn, group_id, "trained without it")


def _longest(conn: Connection, group_id: bytes) -> int | None:
    """Return the length in tokens of the group's longest known sample, or None if no job was leased."""
    leases = select(func.max(db.leases.c.tokens)).join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    results = select(func.max(db.results.c.sampled)).join(db.jobs, db.jobs.c.id == db.results.c.job_id)
    mine = db.jobs.c.group_id == group_id
    found = [conn.scalar(leases.where(mine)), conn.scalar(results.where(mine))]
    return max((int(tokens) for tokens in found if tokens is not None), default=None)


def _cancel_jobs(conn: Connection, group_id: bytes, reason: str) -> None:
    unsettled = select(db.jobs.c.id).where(db.jobs.c.group_id == group_id, db.jobs.c.state.in_(UNSETTLED_JOBS))
    jobs = conn.scalars(unsettled).all()
    held = select(db.leases.c.id).where(db.leases.c.job_id.in_(jobs), db.leases.c.state == "held")
    move_all(conn, "lease", db.leases, conn.scalars(held).all(), "aborted")
    move_all(conn, "job", db.jobs, jobs, "cancelled", reason=reason)


def count_stale_ending(conn: Connection, now: Present, group_id: bytes, most: int) -> bool:
    """Count a lease that ended stale; the ``most``-th drops the group. Returns whether the group was dropped."""
    conn.execute(
        update(db.groups).where(db.groups.c.id == group_id).values(stale_endings=db.groups.c.stale_endings + 1)
    )
    row = conn.execute(select(db.groups.c.stale_endings, db.groups.c.state).where(db.groups.c.id == group_id)).one()
    if row.stale_endings < most or row.state != "open":
        return False
    drop(conn, now, group_id, "stale leases")
    return True
