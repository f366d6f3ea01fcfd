"""Reports of a run from the rows of the ledger: counts by state, ages of rollouts, workers. Reads, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, func, select, text

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.trainer_api import MAX_READ, GroupRow
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import Present, UnknownIdError, acknowledged_step, ahead, finished
from trainer_node.ledger.ledger_states import LIVE_GROUPS
from trainer_node.ledger.staleness_rule import StalenessBounds

MOST_STEPS = 16
"""Steps behind the learner from which on results are counted together."""
LEAST_LENGTH, MOST_LENGTH = 6, 20
"""Powers of two that bound the ranges of lengths, in tokens."""
_REJECTED_JOB = db.jobs.c.state == "rejected"
_ACCEPTED, _REJECTED = text("results.verdict = 'accepted'"), text("results.verdict = 'rejected'")
"""Not parameters: PostgreSQL uses a partial index only for a statement that repeats its condition."""


def status(conn: Connection, now: Present, bounds: StalenessBounds) -> dict[str, Any]:
    return {
        "epoch": now.epoch,
        "learner": str(Version(now.branch, now.step)),
        "acknowledged": acknowledged_step(conn, now),
        "finished": finished(now, bounds),
        "ahead": ahead(conn),
        "versions": len(now.manifests),
        "groups": _counts(conn, db.groups.c.state),
        "jobs": _counts(conn, db.jobs.c.state),
        "rejected_jobs": _rejected_jobs(conn),
        "leases": _counts(conn, db.leases.c.state),
        **_results(conn),
        "replays": _replays(conn),
        "batches": _counts(conn, db.batches.c.state),
        "ages": ages(conn, now),
        "lost_lengths": lost_lengths(conn),
    }


def _counts(conn: Connection, column: Any) -> dict[str, int]:
    rows = conn.execute(select(column, func.count()).group_by(column))
    return {str(name): count for name, count in rows if name is not None}


def _rejected_jobs(conn: Connection) -> dict[str, int]:
    """Count rejected jobs by the reason of their last failure."""
    rows = conn.execute(select(db.jobs.c.reason, func.count()).where(_REJECTED_JOB).group_by(db.jobs.c.reason))
    return {str(reason): count for reason, count in rows}


def _replays(conn: Connection) -> dict[str, int]:
    replay = db.results.c.replay
    rows = conn.execute(select(replay, func.count()).where(replay.is_not(None)).group_by(replay))
    return {str(found): count for found, count in rows}


def _results(conn: Connection) -> dict[str, Any]:
    """``results`` by verdict, ``rejections`` by reason, ``mean_tokens``: sampled tokens of an accepted result."""
    tokens = func.sum(db.results.c.sampled)
    accepted, sampled = conn.execute(select(func.count(), tokens).select_from(db.results).where(_ACCEPTED)).one()
    reason = db.results.c.reason
    rejected = conn.execute(select(reason, func.count().label("number")).where(_REJECTED).group_by(reason))
    rejections = {row.reason: row.number for row in rejected}
    results = {"accepted": accepted, "rejected": sum(rejections.values())}
    return {
        "results": {verdict: count for verdict, count in results.items() if count},
        "rejections": rejections,
        "mean_tokens": round(float(sampled) / accepted, 2) if accepted else None,
    }


def ages(conn: Connection, now: Present) -> dict[str, dict[str, int]]:
    """Rollouts by the age of their oldest weights in learner steps. ``in_flight``: held leases, by the version that the
    engine served at their start. ``in_queue``: accepted results that the learner has not taken.
    """
    taken = (
        select(db.batch_members.c.group_id)
        .join(db.batches, db.batches.c.id == db.batch_members.c.batch_id)
        .where(db.batches.c.state != "reopened")
    )
    flying = select(_age(now, db.leases.c.served), func.count().label("number")).where(db.leases.c.state == "held")
    queued = (
        select(_age(now, db.results.c.oldest_step), func.count().label("number"))
        .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
        .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
        .where(
            db.results.c.verdict == "accepted",
            db.groups.c.purpose == "train",
            db.groups.c.state.in_(LIVE_GROUPS),
            db.groups.c.id.not_in(taken),
        )
    )
    return {
        name: {str(row.age): row.number for row in conn.execute(query.group_by("age").order_by("age"))}
        for name, query in (("in_flight", flying), ("in_queue", queued))
    }


def lost_lengths(conn: Connection) -> dict[str, dict[str, int]]:
    """Groups to train that were dropped, by reason, or shortened, each by the tokens of its longest sample: the number
    is the end of a range that doubles. Long samples that are lost more often than short ones bias the training.
    """
    longest, groups = db.groups.c.longest, db.groups.c
    ends = [1 << power for power in range(LEAST_LENGTH, MOST_LENGTH)]
    end = case(*((longest <= one, one) for one in ends), else_=1 << MOST_LENGTH).label("end")
    fate = case((groups.state == "dropped", groups.reason), else_="shortened").label("fate")
    # A shortened group that the learner's branch has reopened may have become whole.
    counted = select(fate, end, func.count().label("number")).where(
        groups.purpose == "train", longest.is_not(None), groups.state.in_(("dropped", "short", "trained"))
    )
    found: dict[str, dict[str, int]] = {}
    for row in conn.execute(counted.group_by("fate", "end").order_by("fate", "end")):
        found.setdefault(row.fate, {})[str(row.end)] = row.number
    return found


def _age(now: Present, step: Any) -> ColumnElement[int]:
    behind = now.step - step
    # A version of the next step is served before the learner has applied the batch: its age is 0.
    return case((behind < 0, 0), (behind > MOST_STEPS, MOST_STEPS), else_=behind).label("age")


def workers(
    conn: Connection, now: Present, rates: Mapping[str, float | None], region: Callable[[bytes], str | None]
) -> list[dict[str, Any]]:
    """Return one row per worker, by name. ``rates``: accepted tokens per second by worker, or None if not measured.
    ``region``: that of a session's engine.
    """
    held = (
        select(func.count())
        .select_from(db.leases)
        .where(db.leases.c.worker_id == db.workers.c.id, db.leases.c.state == "held")
        .scalar_subquery()
    )
    rows = conn.execute(select(db.workers, held.label("held")).order_by(db.workers.c.name)).all()
    return [
        {
            "worker": bytes(row.id).hex(),
            "name": row.name,
            "caller": row.caller,
            "region": region(bytes(row.session)),
            "task": row.task,
            "slots": row.slots,
            "leases": row.held,
            "price_usd_h": row.price_usd_h,
            "served": None if row.served_step is None else str(Version(row.served_branch, row.served_step)),
            "accepted_tokens": row.accepted_tokens,
            "blamed": row.blamed,
            "audits": row.audits,
            "disagreements": row.disagreements,
            "replays": row.replays,
            "false_rewards": row.false_rewards,
            "failed_replays": row.failed_replays,
            "silent_s": round(max(0.0, now.now_s - row.seen_s), 3),
            "tokens_per_s": rates.get(bytes(row.id).hex()),
        }
        for row in rows
    ]


def groups(conn: Connection, group_ids: Sequence[bytes]) -> list[GroupRow]:
    """Return the state and rewards of each group, in the order of the ids. Raises UnknownIdError."""
    if len(group_ids) > MAX_READ:
        raise UsageError(f"{len(group_ids)} groups in one request, and {MAX_READ} are allowed")
    found = select(db.groups.c.id, db.groups.c.state, db.groups.c.reason).where(db.groups.c.id.in_(group_ids))
    rows = {bytes(row.id): row for row in conn.execute(found)}
    if missing := [group for group in group_ids if group not in rows]:
        raise UnknownIdError(f"no group {missing[0].hex()}")
    rewards: dict[bytes, list[float]] = {group: [] for group in rows}
    accepted = (
        select(db.jobs.c.group_id, db.results.c.reward)
        .join(db.results, db.results.c.job_id == db.jobs.c.id)
        .where(db.jobs.c.group_id.in_(group_ids), db.results.c.verdict == "accepted")
        .order_by(db.jobs.c.position)
    )
    for row in conn.execute(accepted):
        rewards[bytes(row.group_id)].append(row.reward)
    return [GroupRow(i, rows[i].state, rows[i].reason, rewards[i]) for i in group_ids]
