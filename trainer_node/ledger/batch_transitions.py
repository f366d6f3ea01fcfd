"""Transitions of batches: taken, applied, acknowledged with the checkpoint that contains them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from p2pcast.ground.errors import RefusedError
from p2pcast.rollouts.overlong import Overlong
from trainer_node.ledger.audits.replaying import DUE, leave_out
from trainer_node.ledger.batch_cut import OVERSAMPLE, CandidateGroup, Cut, GroupVerdict, cut
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.job_groups import FOREIGN, NOT_PLAYED, drop, shorten
from trainer_node.ledger.ledger_rows import (
    Present,
    UnknownIdError,
    check_epoch,
    finished,
    in_parts,
    live_batch_groups,
    move,
    move_all,
)
from trainer_node.ledger.ledger_states import LIVE_GROUPS, UNSETTLED_JOBS
from trainer_node.ledger.staleness_rule import StalenessBounds

MOST_UNPLAYABLE = 64
"""Groups that may end for one batch, those that cannot be played included, before the learner sees an error."""


class MemberResult(NamedTuple):
    """``place``: of the result's bytes. ``worker``: name. ``settled_step``: of the learner, when the result came."""

    place: Place
    reward: float
    worker: str
    settled_step: int


class BatchMember(NamedTuple):
    """``group``: bytes of the record."""

    group: bytes
    results: tuple[MemberResult, ...]


class CutBatch(NamedTuple):
    id: bytes
    step: int
    members: tuple[BatchMember, ...]


class Taken(NamedTuple):
    """Without a batch, the learner waits unless the run has finished. ``played`` and ``reward``: how many groups ended
    for this batch, including dropped ones, and their mean reward. ``refusal``: why no batch is possible although enough
    groups were played.
    """

    batch: CutBatch | None
    finished: bool
    played: int = 0
    reward: float | None = None
    refusal: str | None = None


def take(
    conn: Connection,
    now: Present,
    bounds: StalenessBounds,
    new_id: Callable[[], bytes],
    *,
    epoch: int,
    branch: int,
    step: int,
    overlong: Overlong,
) -> Taken:
    """The batch of the learner's step; the same batch when repeated. Open jobs of its groups are cancelled.
    ``overlong``: the learner's treatment of truncated results, by which groups are judged. Raises RefusedError
    for another epoch or step.
    """
    if (before := _without_cut(conn, now, bounds, epoch, branch, step)) is not None:
        return before
    live, made = _cut(conn, now, bounds, overlong)
    for candidate, verdict in made.dropped:
        assert verdict is not GroupVerdict.USE
        drop(conn, now, live[candidate.opened], verdict.value)
    if made.batch is None:
        gone = {candidate.opened for candidate, _ in made.dropped}
        return Taken(None, False, *_report(conn, now, None, 0), _refusal(conn, now, bounds, live.keys() - gone))
    batch_id = new_id()
    conn.execute(
        insert(db.batches).values(
            id=batch_id,
            epoch=now.epoch,
            branch=now.branch,
            step=now.step,
            oldest_step=now.step - bounds.staleness,
            state="cut",
        )
    )
    members = [
        {"batch_id": batch_id, "ordinal": ordinal, "group_id": live[candidate.opened]}
        for ordinal, candidate in enumerate(made.batch)
    ]
    conn.execute(insert(db.batch_members), members)
    for candidate in made.batch:
        if candidate.unsettled:
            leave_out(conn, live[candidate.opened])
            shorten(conn, live[candidate.opened])
    return _taken(conn, now, conn.execute(select(db.batches).where(db.batches.c.id == batch_id)).one())


def foreseen(
    conn: Connection, now: Present, bounds: StalenessBounds, *, epoch: int, branch: int, step: int, overlong: Overlong
) -> Taken | None:
    """Return what ``take`` would return, or None if ``take`` would change the database. Runs outside a transition: with
    many groups it takes longer than lease requests should wait. Raises the same errors as ``take``.
    """
    if (before := _without_cut(conn, now, bounds, epoch, branch, step)) is not None:
        return before
    live, made = _cut(conn, now, bounds, overlong)
    if made.batch is not None or made.dropped or _refusal(conn, now, bounds, live) is not None:
        return None
    return Taken(None, False, *_report(conn, now, None, 0))


def _without_cut(
    conn: Connection, now: Present, bounds: StalenessBounds, epoch: int, branch: int, step: int
) -> Taken | None:
    """Return the answer if the run has finished or the batch was already cut, otherwise None."""
    check_epoch(now, epoch)
    if (branch, step) != (now.branch, now.step):
        raise RefusedError(f"the learner is at {branch}.{step}, and the ledger at {now.branch}.{now.step}")
    if finished(now, bounds):
        return Taken(None, True)
    row = conn.execute(select(db.batches).where(db.batches.c.step == step, db.batches.c.state == "cut")).first()
    return None if row is None else _taken(conn, now, row)


def _cut(conn: Connection, now: Present, bounds: StalenessBounds, overlong: Overlong) -> tuple[dict[int, bytes], Cut]:
    """The groups that are in no batch, by their numbers, and what becomes of them."""
    groups = select(db.groups.c.id, db.groups.c.opened).where(
        db.groups.c.state.in_(LIVE_GROUPS), db.groups.c.purpose == "train", db.groups.c.id.not_in(live_batch_groups)
    )
    live = {row.opened: row.id for row in conn.execute(groups)}
    candidates = _candidates(conn, {group_id: opened for opened, group_id in live.items()})
    return live, cut(bounds, candidates, now.step, _played(conn, now), overlong)


def _candidates(conn: Connection, opened: dict[bytes, int]) -> list[CandidateGroup]:
    steps: dict[bytes, list[int]] = defaultdict(list)
    rewards: dict[bytes, list[float]] = defaultdict(list)
    cut_off: dict[bytes, list[bool]] = defaultdict(list)
    marks = db.cut_off_results.c
    unsettled: dict[bytes, int] = {}
    # The list of groups makes the database begin with their jobs, not with all results.
    for ids in in_parts(opened):
        accepted = (
            select(
                db.jobs.c.group_id,
                db.results.c.oldest_step,
                db.results.c.reward,
                db.results.c.replay,
                marks.job_id.is_not(None).label("cut_off"),
            )
            .join(db.results, db.results.c.job_id == db.jobs.c.id)
            # By the lease too: an earlier result of the job may have been cut off, and count no more.
            .outerjoin(
                db.cut_off_results,
                (marks.job_id == db.results.c.job_id) & (marks.lease_id == db.results.c.lease_id),
            )
            .where(db.jobs.c.group_id.in_(ids), db.results.c.verdict == "accepted")
            .order_by(db.jobs.c.position)
        )
        due: Counter[bytes] = Counter()
        for row in conn.execute(accepted):
            if row.replay == DUE:
                due[row.group_id] += 1
                continue
            steps[row.group_id].append(row.oldest_step)
            rewards[row.group_id].append(row.reward)
            cut_off[row.group_id].append(row.cut_off)
        counted = (
            select(db.jobs.c.group_id, func.count().label("jobs"))
            .where(db.jobs.c.group_id.in_(ids), db.jobs.c.state.in_(UNSETTLED_JOBS))
            .group_by(db.jobs.c.group_id)
        )
        unsettled |= due + Counter({row.group_id: row.jobs for row in conn.execute(counted)})
    return [
        CandidateGroup(number, steps[group], rewards[group], unsettled.get(group, 0), cut_off[group])
        for group, number in opened.items()
    ]


def _dropped(now: Present) -> ColumnElement[bool]:
    """Groups that were played for the present batch, and dropped."""
    groups = db.groups.c
    return _ended_now(now) & groups.reason.not_in(NOT_PLAYED)


def _ended_now(now: Present) -> ColumnElement[bool]:
    groups = db.groups.c
    dropped = (groups.state == "dropped") & (groups.purpose == "train")
    return dropped & (groups.ended_epoch == now.epoch) & (groups.ended_step == now.step)


def _played(conn: Connection, now: Present) -> int:
    """Groups that were played for the present batch, and dropped."""
    return int(conn.scalar(select(func.count()).select_from(db.groups).where(_dropped(now))) or 0)


def _refusal(conn: Connection, now: Present, bounds: StalenessBounds, live: Collection[int]) -> str | None:
    """Return why there can be no batch: enough groups ended for it, but none can be trained. Groups in ``live`` that
    were opened before the last of them are waited for, because fast workers may have played the others first.
    """
    ended = select(db.groups.c.opened, db.groups.c.reason).where(_ended_now(now), db.groups.c.reason != FOREIGN)
    rows = conn.execute(ended.where(db.groups.c.opened.is_not(None)).order_by(db.groups.c.opened)).all()
    played = [row for row in rows if row.reason not in NOT_PLAYED]
    most = OVERSAMPLE * bounds.batch_groups
    for which, enough in ((played, most), (rows, max(most, MOST_UNPLAYABLE))):
        if len(which) >= enough and not any(opened < which[enough - 1].opened for opened in live):
            counts = Counter(row.reason for row in rows).most_common()
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts)
            return (
                f"none of the {len(rows)} groups that ended for step {now.step} can be trained ({reasons}): check the"
                " task's prompts and rewards, its difficulty and the temperature"
            )
    return None


def _taken(conn: Connection, now: Present, row: Row[Any]) -> Taken:
    groups = conn.execute(
        select(db.groups.c.id, db.groups.c.body)
        .join(db.batch_members, db.batch_members.c.group_id == db.groups.c.id)
        .where(db.batch_members.c.batch_id == row.id)
        .order_by(db.batch_members.c.ordinal)
    ).all()
    results = _results(conn, row.id, row.oldest_step)
    members = tuple(BatchMember(bytes(g.body), tuple(results[bytes(g.id)])) for g in groups)
    report = _report(conn, now, row.id, len(groups))
    return Taken(CutBatch(bytes(row.id), row.step, members), False, *report)


def _results(conn: Connection, batch: bytes, oldest_step: int) -> Mapping[bytes, list[MemberResult]]:
    """Return the fresh results, by group."""
    rows = conn.execute(
        select(db.jobs.c.group_id, db.results, db.workers.c.name)
        .select_from(db.batch_members)
        .join(db.jobs, db.jobs.c.group_id == db.batch_members.c.group_id)
        .join(db.results, db.results.c.job_id == db.jobs.c.id)
        .join(db.leases, db.leases.c.id == db.results.c.lease_id)
        .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
        .where(
            db.batch_members.c.batch_id == batch,
            db.results.c.verdict == "accepted",
            db.results.c.oldest_step >= oldest_step,
        )
        .order_by(db.jobs.c.position)
    )
    found: dict[bytes, list[MemberResult]] = defaultdict(list)
    for row in rows:
        place = Place(row.segment, row.offset, row.length)
        found[bytes(row.group_id)].append(MemberResult(place, row.reward, row.name, row.settled_step))
    return found


def _report(conn: Connection, now: Present, batch: bytes | None, used: int) -> tuple[int, float | None]:
    """Return how many groups ended for this batch, used or dropped, and the mean reward of their accepted results."""
    members = select(db.batch_members.c.group_id).where(db.batch_members.c.batch_id == batch)
    mean = (
        select(func.avg(db.results.c.reward))
        .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
        .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
        .where(db.results.c.verdict == "accepted", _dropped(now) | db.groups.c.id.in_(members))
    )
    return used + _played(conn, now), conn.scalar(mean)


def applied(conn: Connection, now: Present, *, epoch: int, batch: bytes, step: int) -> None:
    """Record that the learner has applied the batch and is now at ``step``. Idempotent."""
    check_epoch(now, epoch)
    row = conn.execute(select(db.batches).where(db.batches.c.id == batch)).first()
    if row is None:
        raise UnknownIdError(f"no batch {batch.hex()}")
    if step != row.step + 1:
        raise RefusedError(f"batch {batch.hex()} leads to step {row.step + 1}, not {step}")
    if row.state in ("applied", "trained"):
        return
    if row.state != "cut" or row.step != now.step:
        raise RefusedError(f"batch {batch.hex()} is {row.state}, of step {row.step}; the ledger is at {now.step}")
    move(conn, "batch", db.batches, batch, "applied")
    conn.execute(update(db.meta).values(step=step))


def ack(
    conn: Connection, now: Present, *, epoch: int, step: int, batch_ids: Sequence[bytes], checkpoint: bytes
) -> None:
    """Mark the batches as trained: a checkpoint of ``step`` contains them. Idempotent."""
    check_epoch(now, epoch)
    for batch in batch_ids:
        row = conn.execute(select(db.batches).where(db.batches.c.id == batch)).first()
        if row is None:
            raise UnknownIdError(f"no batch {batch.hex()}")
        if row.state == "trained":
            continue
        if row.state != "applied" or row.step >= step:
            raise RefusedError(f"batch {batch.hex()} is {row.state}, of step {row.step}: it is in no checkpoint")
        trained(conn, batch, checkpoint)


def trained(conn: Connection, batch: bytes, checkpoint: bytes | None) -> None:
    """Mark a batch and its groups as trained."""
    move(conn, "batch", db.batches, batch, "trained", checkpoint=checkpoint)
    members = select(db.batch_members.c.group_id).where(db.batch_members.c.batch_id == batch)
    move_all(conn, "group", db.groups, conn.scalars(members).all(), "trained")
