"""Transitions of jobs that fail: played again, by another caller if there is one, or rejected.

A rejected result and a lease that comes back for the job's own fault are failures alike. A job is rejected by failures
of three callers, by three returns of two callers, and by three failures where no other caller is left. Nine failures
reject the job, whichever callers they are of.
All jobs of a group have one prompt. A return, and a result that is not scored, is a failure of the prompt. So three of
them in one group, of two callers or of the only one, end the group before anything of it is accepted, whichever jobs
they are of. A group with an accepted result goes on, and so does one whose job failed for another reason.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from p2pcast.ground.version import Version
from p2pcast.rollouts.return_reason import Returned
from trainer_node.ledger.acceptance import Reason
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.job_groups import UNPLAYABLE, count_stale_ending, drop, end_settled
from trainer_node.ledger.ledger_rows import (
    MAX_FAILURES,
    MAX_REJECTED,
    MAX_STALE_ENDINGS,
    Policy,
    Present,
    admissible,
    caller_of,
    callers_seen,
    move,
)
from trainer_node.ledger.ledger_states import UNSETTLED_JOBS

NO_FAILURES = tuple(
    one.value for one in (Reason.STALE, Reason.DEAD, Reason.UNVERSIONED, Reason.DUPLICATE, Reason.DISTRUSTED)
)
"""Reasons that say nothing about the job."""
LEAST_RETURNERS = 2
"""Callers whose MAX_FAILURES returns reject a job: no caller does so alone."""


def fail_job(conn: Connection, now: Present, policy: Policy, row: Row[Any], reason: Reason, detail: str = "") -> None:
    """The job of a rejected result. A stale ending counts for the group only if the version at the lease's beginning is
    stale by now: otherwise one worker could drop any group by naming old versions. Evaluations are as old as their
    version, so no ending of theirs counts. A result that ends because of another result's reward, or that names no
    version, says nothing about the job.
    """
    job = update(db.jobs).where(db.jobs.c.id == row.job_id)
    if reason in (Reason.STALE, Reason.DEAD):
        move(conn, "job", db.jobs, row.job_id, "open")
        if row.purpose == "train" and not admissible(now, policy, Version(row.branch, row.served)):
            count_stale_ending(conn, now, row.group_id, MAX_STALE_ENDINGS)
        else:
            conn.execute(job.values(failed_by=caller_of(row), failed_s=now.now_s))
        return
    if reason in (Reason.DISTRUSTED, Reason.UNVERSIONED):
        conn.execute(job.values(failed_by=caller_of(row), failed_s=now.now_s))
        move(conn, "job", db.jobs, row.job_id, "open")
        return
    _count(conn, now, row, reason.value, detail, of_prompt=reason is Reason.UNSCORED)


def fail_returned(conn: Connection, now: Present, row: Row[Any], returned: Returned) -> None:
    """Fail the job of a lease that was returned for the job's own fault. ``row``: the lease, with its job's state,
    group and task, and the caller. The lease may have expired, and the job may be leased to another worker. Idempotent.
    """
    known = (db.job_returns.c.job_id == row.job_id) & (db.job_returns.c.lease_id == row.id)
    if conn.execute(select(db.job_returns.c.lease_id).where(known)).first() is not None:
        return
    # Another lease of the request may have ended the group.
    if conn.scalar(select(db.jobs.c.state).where(db.jobs.c.id == row.job_id)) not in UNSETTLED_JOBS:
        return
    conn.execute(insert(db.job_returns).values(job_id=row.job_id, lease_id=row.id, caller=caller_of(row)))
    _count(conn, now, row, returned.reason.value, returned.detail, of_prompt=True)


def _count(conn: Connection, now: Present, row: Row[Any], reason: str, detail: str, *, of_prompt: bool) -> None:
    """Count a failure of the row's unsettled job. ``of_prompt``: whether the group's other jobs would fail too."""
    job = conn.execute(select(db.jobs.c.failures, db.jobs.c.state).where(db.jobs.c.id == row.job_id)).one()
    failures = int(job.failures) + 1
    failed = {"failures": failures, "failed_by": caller_of(row), "failed_s": now.now_s}
    played = _is_played(conn, row)
    ends_group = of_prompt and not _has_accepted(conn, row)
    given_up = (ends_group and _is_prompt_given_up(conn, now, row)) or (
        failures >= MAX_FAILURES and _given_up(conn, now, row, failures)
    )
    if given_up and not played:
        move(conn, "job", db.jobs, row.job_id, "rejected", reason=reason, **failed)
        _tell(conn, now, row, reason, detail)
        if ends_group:
            drop(conn, now, row.group_id, UNPLAYABLE)
        else:
            end_settled(conn, now, {bytes(row.group_id)})
        return
    conn.execute(update(db.jobs).where(db.jobs.c.id == row.job_id).values(**failed))
    if not played and job.state != "open":
        move(conn, "job", db.jobs, row.job_id, "open")


def _is_played(conn: Connection, row: Row[Any]) -> bool:
    """Whether another worker is playing the job."""
    held = select(db.leases.c.id).where(db.leases.c.job_id == row.job_id, db.leases.c.state == "held")
    return conn.execute(held).first() is not None


def _tell(conn: Connection, now: Present, row: Row[Any], reason: str, detail: str) -> None:
    source = conn.scalar(select(db.group_sources.c.source).where(db.group_sources.c.group_id == row.group_id))
    now.happened["job_rejected", source or f"group {bytes(row.group_id).hex()}", reason, detail] += 1


def _has_accepted(conn: Connection, row: Row[Any]) -> bool:
    """Whether a job of the group has an accepted result."""
    accepted = select(db.jobs.c.id).where(db.jobs.c.group_id == row.group_id, db.jobs.c.state == "accepted")
    return conn.execute(accepted).first() is not None


def _is_prompt_given_up(conn: Connection, now: Present, row: Row[Any]) -> bool:
    """Whether the group has failed often enough to be ended: all its jobs have the same prompt."""
    of_group = select(db.jobs.c.id).where(db.jobs.c.group_id == row.group_id)
    returned = select(db.job_returns.c.caller).where(db.job_returns.c.job_id.in_(of_group))
    unscored = (
        select(db.workers.c.id, db.workers.c.caller)
        .join(db.leases, db.leases.c.worker_id == db.workers.c.id)
        .join(db.results, db.results.c.lease_id == db.leases.c.id)
        .where(
            db.results.c.job_id.in_(of_group),
            db.results.c.verdict == "rejected",
            db.results.c.reason == Reason.UNSCORED.value,
        )
    )
    callers = [*conn.scalars(returned), *(caller_of(one) for one in conn.execute(unscored))]
    if len(callers) < MAX_FAILURES:
        return False
    return len(set(callers)) >= LEAST_RETURNERS or callers_seen(conn, now, bytes(row.task_hash)) <= set(callers)


def _given_up(conn: Connection, now: Present, row: Row[Any], failures: int) -> bool:
    """Whether the job has failed too often to be played again."""
    failed = (
        select(db.workers.c.id, db.workers.c.caller)
        .join(db.leases, db.leases.c.worker_id == db.workers.c.id)
        .join(db.results, db.results.c.lease_id == db.leases.c.id)
        .where(
            db.results.c.job_id == row.job_id,
            db.results.c.verdict == "rejected",
            db.results.c.reason.not_in(NO_FAILURES),
        )
    )
    callers = {caller_of(one) for one in conn.execute(failed)}
    returned = conn.scalars(select(db.job_returns.c.caller).where(db.job_returns.c.job_id == row.job_id)).all()
    callers |= set(returned)
    if failures >= MAX_REJECTED or len(callers) >= MAX_FAILURES:
        return True
    if len(returned) >= MAX_FAILURES and len(set(returned)) >= LEAST_RETURNERS:
        return True
    return callers_seen(conn, now, bytes(row.task_hash)) <= callers
