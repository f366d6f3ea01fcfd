"""Retention: the ledger deletes rows that no resume, no late result and no report needs any more.

Guarantees: however long a run lasts, rows and segments stay bounded by the newest ``KEPT_BATCHES`` batches, the time
for late results, and the caps of waiting groups and workers. Nothing goes that counts for a batch still to come.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import ColumnElement, Connection, Select, delete, exists, func, or_, select

from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.job_groups import drop
from trainer_node.ledger.ledger_rows import Present, in_parts
from trainer_node.ledger.ledger_states import LEASE
from trainer_node.ledger.lineage import KEPT_BATCHES
from trainer_node.ledger.prompts import prompting

EVALUATION_STEPS = 64
"""A group for evaluation that has not ended so many steps after it was added is dropped: no engine serves its version
any more.
"""
KEPT_GROUPS = 8192
"""Dropped groups, and evaluated ones, whose rows stay at most."""
MOST_JOBS = 512
"""Jobs of the groups that one transition deletes, a larger group excepted: requests for leases wait for the transition.
"""
LATE_S = 3600.0
"""Seconds after the end of a lease in which its result may still come, and is remembered if it was rejected."""
SILENT_S = 3600.0
"""Seconds after which a silent worker without leases is forgotten."""
BLAMED_S = 86400.0
"""The same for a worker with malformed or forged results."""


def prune_batches(conn: Connection, now: Present) -> None:
    """End evaluations that no engine plays, and delete batches, and the oldest histories of prompts."""
    prompting.prune(conn)
    _end_evaluations(conn, now)
    _forget_batches(conn, now.step - KEPT_BATCHES)


def old_groups(conn: Connection, now: Present) -> list[list[bytes]]:
    """Return the groups to delete, in parts for one transition each."""
    ended = _ended()
    surplus = _free(ended).order_by(db.groups.c.added.desc()).offset(KEPT_GROUPS)
    sizes = {bytes(row.id): row.size for which in (_free(_old(now)), surplus) for row in conn.execute(which)}
    parts: list[list[bytes]] = []
    jobs = MOST_JOBS
    for group, size in sizes.items():
        if jobs + size > MOST_JOBS:
            parts.append([])
            jobs = 0
        parts[-1].append(group)
        jobs += size
    return parts


def prune_groups(conn: Connection, groups: Collection[bytes]) -> None:
    """Delete groups with their jobs, leases and results, except groups that count again since they were listed."""
    prompting.gather(conn)
    which = (_ended() | (db.groups.c.state == "trained")) & db.groups.c.id.in_(groups)
    gone = [row.id for row in conn.execute(_free(which))]
    jobs = select(db.jobs.c.id).where(db.jobs.c.group_id.in_(gone))
    conn.execute(delete(db.results).where(db.results.c.job_id.in_(jobs)))
    conn.execute(delete(db.leases).where(db.leases.c.job_id.in_(jobs)))
    conn.execute(delete(db.jobs).where(db.jobs.c.group_id.in_(gone)))
    conn.execute(delete(db.groups).where(db.groups.c.id.in_(gone)))


def prune_rest(conn: Connection, now: Present, staleness: int) -> tuple[set[int], set[str]]:
    """Delete what no group needs. Returns the segments still in use and the ids of the remaining workers."""
    _forget_late(conn, now.now_s)
    _forget_versions(conn, now, now.step - KEPT_BATCHES - staleness)
    _forget_workers(conn, now.now_s)
    used = select(db.results.c.segment).where(db.results.c.segment.is_not(None)).distinct()
    return set(conn.scalars(used)), {bytes(worker).hex() for worker in conn.scalars(select(db.workers.c.id))}


def _end_evaluations(conn: Connection, now: Present) -> None:
    live = db.groups.c.state.in_(("waiting", "open")) & (db.groups.c.purpose == "evaluate")
    old = db.groups.c.added_step < now.step - EVALUATION_STEPS
    for group in conn.scalars(select(db.groups.c.id).where(live, old)).all():
        drop(conn, now, group, "not played in time")


def _forget_batches(conn: Connection, before: int) -> None:
    old = select(db.batches.c.id).where(db.batches.c.state.in_(("trained", "reopened")), db.batches.c.step < before)
    # A learner that resumes again and again reopens batches of the same steps.
    reopened = select(db.batches.c.id).where(db.batches.c.state == "reopened")
    gone = {*conn.scalars(old), *conn.scalars(reopened.order_by(db.batches.c.epoch.desc()).offset(KEPT_BATCHES))}
    for part in in_parts(gone):
        conn.execute(delete(db.batch_members).where(db.batch_members.c.batch_id.in_(part)))
        conn.execute(delete(db.batches).where(db.batches.c.id.in_(part)))


def _ended() -> ColumnElement[bool]:
    evaluated = (db.groups.c.purpose == "evaluate") & db.groups.c.state.in_(("complete", "short"))
    return evaluated | (db.groups.c.state == "dropped")


def _old(now: Present) -> ColumnElement[bool]:
    return or_(db.groups.c.state == "trained", _ended() & (db.groups.c.ended_step < now.step - KEPT_BATCHES))


def _free(which: ColumnElement[bool]) -> Select[tuple[bytes, int]]:
    """Select groups that are in no batch."""
    members = select(db.batch_members.c.group_id)
    return select(db.groups.c.id, db.groups.c.size).where(which, db.groups.c.id.not_in(members))


def _forget_late(conn: Connection, now_s: float) -> None:
    """Delete leases that ended long ago without an accepted result, and their rejected results."""
    mine = (db.results.c.lease_id == db.leases.c.id) & (db.results.c.verdict == "accepted")
    # By equal states, so that the index of states and times finds the leases.
    over = db.leases.c.state.in_(LEASE["held"]) & (db.leases.c.expires_s < now_s - LATE_S)
    for part in in_parts(conn.scalars(select(db.leases.c.id).where(over, ~exists().where(mine))).all()):
        conn.execute(delete(db.results).where(db.results.c.lease_id.in_(part)))
        conn.execute(delete(db.leases).where(db.leases.c.id.in_(part)))


def _forget_versions(conn: Connection, now: Present, oldest: int) -> None:
    """Versions below the step ``oldest`` with their schedules, unless an evaluation pins one, and the branches that
    ended before it.
    """
    live = db.groups.c.state.in_(("waiting", "open"))
    pinned = select(db.groups.c.pinned_step).where(live, db.groups.c.pinned_step.is_not(None))
    newest = select(func.max(db.versions.c.step)).where(db.versions.c.branch == now.branch).scalar_subquery()
    old = (db.versions.c.step < oldest) & db.versions.c.step.not_in(pinned)
    # Whether a learner may go on under its branch depends on the branch's newest version.
    conn.execute(delete(db.versions).where(old, or_(db.versions.c.branch != now.branch, db.versions.c.step < newest)))
    kept = (db.versions.c.branch == db.schedules.c.branch) & (db.versions.c.step == db.schedules.c.step)
    conn.execute(delete(db.schedules).where(~exists().where(kept)))
    conn.execute(delete(db.forks).where(db.forks.c.step < oldest))


def _forget_workers(conn: Connection, now_s: float) -> None:
    silent = (db.workers.c.blamed == 0) & (db.workers.c.disagreements == 0) & (db.workers.c.seen_s < now_s - SILENT_S)
    silent |= db.workers.c.seen_s < now_s - BLAMED_S
    leases = select(db.leases.c.worker_id)
    conn.execute(delete(db.workers).where(silent, db.workers.c.id.not_in(leases)))
