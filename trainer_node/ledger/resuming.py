"""Transitions that go back: a learner begins again, with a new epoch and perhaps a new branch; a batch has damaged
bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from trainer_node.ledger.acceptance import Reason
from trainer_node.ledger.batch_transitions import trained
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.ledger_rows import Present, acknowledged_step, move
from trainer_node.ledger.ledger_states import LIVE_GROUPS
from trainer_node.ledger.lineage import Lineage, least_step


def resume(
    conn: Connection,
    now: Present,
    *,
    branch: int,
    step: int,
    checkpoint: bytes | None,
    batch_ids: Sequence[bytes],
    from_start: bool = False,
) -> int:
    """The learner trains on from a checkpoint of ``step`` steps, which contains ``batch_ids``, under ``branch``.
    Returns the new epoch. Batches of the checkpoint are trained, all later ones reopened; leases and results of
    versions that are not live any more are cancelled. Without a checkpoint a new branch continues no other: its first
    weights may be any. Raises RefusedError for a checkpoint that does not fit, and for a step from which the run would
    be undone unless ``from_start`` says so.
    """
    if not from_start:
        _check_not_undone(conn, now, step, checkpoint)
    lineage = now.lineage
    if branch != now.branch:
        begins = checkpoint is None and step == 0
        lineage = now.lineage.begun(branch) if begins else now.lineage.forked(branch, step)
    _check_step(conn, now, branch, step)
    _settle_batches(conn, step, checkpoint, set(batch_ids))
    if (fork := lineage.forks.get(branch)) is not None and branch != now.branch:
        conn.execute(insert(db.forks).values(branch=branch, parent=fork.parent, step=fork.step))
    conn.execute(update(db.meta).values(epoch=now.epoch + 1, branch=branch, step=step))
    _cancel_dead_leases(conn, lineage)
    _cancel_dead_results(conn, lineage)
    # A result waits from now on: in the lineage of the checkpoint the later steps never were.
    conn.execute(update(db.results).where(db.results.c.settled_step > step).values(settled_step=step))
    return now.epoch + 1


def _check_step(conn: Connection, now: Present, branch: int, step: int) -> None:
    newest = conn.scalar(select(func.max(db.versions.c.step)).where(db.versions.c.branch == branch))
    if branch == now.branch and newest is not None and newest > step:
        raise RefusedError(f"version {branch}.{newest} was published: resume from step {step} under a new branch")
    last = conn.scalar(select(func.max(db.batches.c.step)).where(db.batches.c.state != "reopened"))
    if step > now.step and last is not None and step != last + 1:
        raise RefusedError(
            f"no batch leads to step {step}: the ledger is at step {now.step}. If the ledger is an older copy, restore"
            f" it by `p2pcast restore --step {step}`; otherwise resume from step {now.step} or earlier"
        )


def _check_not_undone(conn: Connection, now: Present, step: int, checkpoint: bytes | None) -> None:
    """A wrong folder of checkpoints is an older one, or an empty one."""
    held = acknowledged_step(conn, now)
    if step < least_step(now.step, held, checkpoint=checkpoint is not None):
        source = "without a checkpoint" if checkpoint is None else "from a checkpoint"
        raise RefusedError(
            f"a learner that begins at step {step} {source} would undo the run: the ledger is at step {now.step}, and"
            f" checkpoints contain {held} steps. Give the learner the checkpoints of this run, or say that it begins"
            " there all the same: `p2pcast learn --from-start`, or from_start in the request"
        )


def _settle_batches(conn: Connection, step: int, checkpoint: bytes | None, contained: set[bytes]) -> None:
    """A live batch of an earlier step is in the lineage of the present weights, because a resume reopens all others. So
    the checkpoint contains it: the batch would be trained twice if it was reopened.
    """
    rows = conn.execute(select(db.batches).order_by(db.batches.c.step)).all()
    unknown = contained.difference(bytes(row.id) for row in rows)
    for row in rows:
        batch = bytes(row.id)
        if row.step == step - 1 and row.state != "reopened" and unknown and batch not in contained:
            raise RefusedError(
                f"the checkpoint of step {step} was trained on batch {min(unknown).hex()}, which this ledger does not"
                f" know, and not on its batch {batch.hex()} of step {row.step}: the ledger is an older copy. Restore it"
                " with a checkpoint of its own time, or begin with a new ledger"
            )
        if batch in contained:
            if row.state == "reopened":
                raise RefusedError(f"batch {batch.hex()} was reopened: another learner has replaced the checkpoint's")
            if row.step >= step:
                raise UsageError(f"batch {batch.hex()} is of step {row.step}: it cannot be in a checkpoint of {step}")
            if row.state != "trained":
                trained(conn, batch, checkpoint)
        elif row.step >= step and row.state != "reopened":
            _reopen(conn, batch, was_trained=row.state == "trained")
        elif row.state in ("cut", "applied"):
            raise RefusedError(
                f"the checkpoint of step {step} does not name batch {batch.hex()} of step {row.step}, which is"
                f" {row.state} and in no checkpoint yet: name all batches since the last acknowledged checkpoint, or"
                f" resume from step {row.step} or earlier"
            )


def _reopen(conn: Connection, batch: bytes, *, was_trained: bool) -> None:
    move(conn, "batch", db.batches, batch, "reopened")
    if not was_trained:
        return
    members = select(db.batch_members.c.group_id).where(db.batch_members.c.batch_id == batch)
    for group in conn.scalars(members).all():
        failed = (
            select(func.count()).select_from(db.jobs).where(db.jobs.c.group_id == group, db.jobs.c.state != "accepted")
        )
        move(conn, "group", db.groups, group, "short" if conn.scalar(failed) else "complete")


def _cancel_dead_leases(conn: Connection, lineage: Lineage) -> None:
    held = (
        select(db.leases)
        .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
        .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
        .where(db.leases.c.state == "held", db.groups.c.purpose == "train")
    )
    for row in conn.execute(held).all():
        if not lineage.is_live(Version(row.branch, row.served)):
            move(conn, "lease", db.leases, row.id, "aborted")
            move(conn, "job", db.jobs, row.job_id, "open")


def _cancel_dead_results(conn: Connection, lineage: Lineage) -> None:
    """Results of training groups that no checkpoint contains: their jobs are played again."""
    rows = conn.execute(
        select(db.results, db.groups.c.id.label("group_id"))
        .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
        .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
        .where(
            db.results.c.verdict == "accepted",
            db.groups.c.purpose == "train",
            db.groups.c.state.in_(LIVE_GROUPS),
        )
    ).all()
    for row in rows:
        if all(lineage.is_live(Version.parse(version)) for version in row.versions.split()):
            continue
        _cancel_result(conn, row, Reason.DEAD, "the learner left its branch")


def _cancel_result(conn: Connection, row: Row[Any], reason: Reason, detail: str) -> None:
    """An accepted result counts no more: its job is played again."""
    cancelled = {"verdict": "rejected", "reason": reason.value, "detail": detail}
    conn.execute(
        update(db.results)
        .where(db.results.c.job_id == row.job_id, db.results.c.lease_id == row.lease_id)
        .values(segment=None, offset=None, length=None, **cancelled)
    )
    move(conn, "job", db.jobs, row.job_id, "open")
    if conn.scalar(select(db.groups.c.state).where(db.groups.c.id == row.group_id)) != "open":
        move(conn, "group", db.groups, row.group_id, "open")


def reopen_damaged(conn: Connection, batch: bytes, places: Sequence[Place]) -> int:
    """Bodies of a cut batch cannot be read. Their jobs are played again, and the batch is reopened: the next one is cut
    without their groups. Returns the number of results; 0 if the batch is not cut any more.
    """
    if conn.scalar(select(db.batches.c.state).where(db.batches.c.id == batch)) != "cut":
        return 0
    _reopen(conn, batch, was_trained=False)
    found = 0
    for place in places:
        rows = conn.execute(
            select(db.results, db.jobs.c.group_id)
            .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
            .where(db.results.c.segment == place.segment, db.results.c.offset == place.offset)
        ).all()
        for row in rows:
            _cancel_result(conn, row, Reason.DAMAGED, "its bytes at the ledger are damaged")
            found += 1
    return found
