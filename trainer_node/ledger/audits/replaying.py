"""Transitions of trusted rewards: a random share of them is computed again, after the results were accepted.

Guarantees:

- A result's replay is decided and recorded in the transaction that accepts the result, and its worker is never told.
  So no other body, no closed connection and no restart evades it.
- No result is trained while its replay is due.
- One wrong reward ends all results of the same party that were not replayed, unless a batch of the learner contains
  them. Results of a batch end if the batch is reopened. From then on each of the party's results is replayed.
- A worker's results are all replayed until NEW_WORKER of them agreed; each replay that fails adds as many. So another
  name, and results whose replays hang, gain nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, func, select, update

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Job, job_of
from trainer_node.ledger.acceptance import Reason, Rejection
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.job_groups import read_groups
from trainer_node.ledger.ledger_rows import BEARER, Policy, Present, Trust, caller_of, live_batch_groups, move
from trainer_node.ledger.ledger_states import LIVE_GROUPS

NEW_WORKER = 4
"""Replays that have to agree before a worker's results are sampled."""
DUE, AGREES, DISAGREES, FAILS = "due", "agrees", "disagrees", "fails"
"""States of a replay; null for a result that is not replayed."""


Fail = Callable[[Connection, Present, Policy, Row[Any], Reason], None]
"""Has the job of a result that counts no more played again, or ends it."""


class Due(NamedTuple):
    """``caller``: the party responsible for the result."""

    job: bytes
    lease: bytes
    caller: str


class AuditReplay(NamedTuple):
    """``place``: where the result's bytes are stored."""

    job: Job
    place: Place


class ReplayEnded(NamedTuple):
    """``worker``: name. ``found``: AGREES, DISAGREES or FAILS. ``rejected``: the results that no longer count."""

    worker: str
    found: str
    rejected: int


def sampler_of(conn: Connection, trust: Trust, worker_id: bytes, draw: Callable[[], float]) -> Callable[[], str | None]:
    """Return a function that draws each result's initial replay state. ``draw`` returns a number in [0, 1)."""
    if not trust.replays:
        return lambda: None
    worker = conn.execute(select(db.workers).where(db.workers.c.id == worker_id)).one()
    everything = worker.replays < NEW_WORKER * (1 + worker.failed_replays) or _has_lied(conn, worker)
    return lambda: DUE if everything or draw() < trust.share else None


def _has_lied(conn: Connection, worker: Row[Any]) -> bool:
    lies = select(func.sum(db.workers.c.false_rewards)).where(_party(worker))
    return bool(conn.scalar(lies))


def _party(worker: Row[Any]) -> ColumnElement[bool]:
    """Select the workers of one party: all of a certificate, or the one that presents a bearer token."""
    one: ColumnElement[bool] = db.workers.c.id == (getattr(worker, "worker_id", None) or worker.id)
    return one if worker.caller == BEARER else db.workers.c.caller == worker.caller


def due(conn: Connection, task_hash: bytes, most: int) -> list[Due]:
    """Return due replays, taking turns between parties."""
    rows = conn.execute(
        select(db.results.c.job_id, db.results.c.lease_id, db.workers.c.id, db.workers.c.caller)
        .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
        .join(db.leases, db.leases.c.id == db.results.c.lease_id)
        .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
        .where(db.results.c.replay == DUE, db.results.c.segment.is_not(None), db.jobs.c.task_hash == task_hash)
        .order_by(db.jobs.c.opened, db.jobs.c.position)
    )
    parties: dict[str, list[Due]] = defaultdict(list)
    for row in rows:
        parties[caller_of(row)].append(Due(bytes(row.job_id), bytes(row.lease_id), caller_of(row)))
    turns = zip_longest(*parties.values())
    return [one for turn in turns for one in turn if one is not None][:most]


def read(conn: Connection, one: Due) -> AuditReplay | None:
    """Return the replay's data, or None if the replay is no longer due."""
    row = _row(conn, one)
    if row is None:
        return None
    (group,) = read_groups(conn, {bytes(row.group_id)}).values()
    job = job_of(group, row.position, one.job, Version(row.branch, row.oldest))
    return AuditReplay(job, Place(row.segment, row.offset, row.length))


def end(
    conn: Connection,
    now: Present,
    policy: Policy,
    one: Due,
    found: float | Rejection,
    fail: Fail,
) -> ReplayEnded | None:
    """Record a replay, or return None if it is no longer due. ``found``: the reward, or why there is none."""
    row = _row(conn, one)
    if row is None:
        return None
    what = _verdict(row.reward, found)
    if not (isinstance(found, Rejection) and found.reason is Reason.DAMAGED):  # the fault of this machine
        _count(conn, row, what)
    this = (db.results.c.job_id == one.job) & (db.results.c.lease_id == one.lease)
    conn.execute(update(db.results).where(this).values(replay=what))
    if what == AGREES:
        if row.verdict != "accepted":
            conn.execute(update(db.results).where(this).values(segment=None, offset=None, length=None))
        return ReplayEnded(row.name, what, 0)
    if isinstance(found, Rejection):
        wrong = found
    else:
        wrong = Rejection(Reason.FORGED, f"the worker's reward is {row.reward}, and the task's {found}")
    ended = [(row, wrong)]
    if what == DISAGREES:
        distrust = Rejection(Reason.DISTRUSTED, f"the reward of lease {one.lease.hex()} of the same worker is wrong")
        ended += [(other, distrust) for other in _untrained(conn, _party(row))]
    for other, why in ended:
        _reject(conn, now, policy, other, why, fail)
    return ReplayEnded(row.name, what, len(ended))


def distrust_reopened(conn: Connection, now: Present, policy: Policy, fail: Fail) -> None:
    """Batches were reopened: results of parties that stated a wrong reward end, as they would have ended before."""
    for liar in conn.execute(select(db.workers).where(db.workers.c.false_rewards > 0)).all():
        distrust = Rejection(Reason.DISTRUSTED, "a reward of the same worker was wrong")
        for row in _untrained(conn, _party(liar)):
            _reject(conn, now, policy, row, distrust, fail)


def _verdict(stated: float, found: float | Rejection) -> str:
    """Rewards must be equal bit for bit: even a small difference would make a group of equal rewards trainable."""
    if isinstance(found, Rejection):
        return DISAGREES if found.reason is Reason.FORGED else FAILS
    return AGREES if found == stated else DISAGREES


def _count(conn: Connection, row: Row[Any], what: str) -> None:
    workers = db.workers.c
    counted = {
        AGREES: {"replays": workers.replays + 1},
        DISAGREES: {"false_rewards": workers.false_rewards + 1, "blamed": workers.blamed + 1},
        FAILS: {"failed_replays": workers.failed_replays + 1},
    }
    conn.execute(update(db.workers).where(workers.id == row.worker_id).values(**counted[what]))


_RESULTS = (
    select(
        db.results,
        db.jobs.c.group_id,
        db.jobs.c.position,
        db.jobs.c.task_hash,
        db.groups.c.purpose,
        db.leases.c.worker_id,
        db.leases.c.branch,
        db.leases.c.served,
        db.leases.c.oldest,
        db.workers.c.name,
        db.workers.c.caller,
    )
    .join(db.jobs, db.jobs.c.id == db.results.c.job_id)
    .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
    .join(db.leases, db.leases.c.id == db.results.c.lease_id)
    .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
)


def _row(conn: Connection, one: Due) -> Row[Any] | None:
    mine = (db.results.c.job_id == one.job) & (db.results.c.lease_id == one.lease)
    return conn.execute(_RESULTS.where(mine, db.results.c.replay == DUE, db.results.c.segment.is_not(None))).first()


def _untrained(conn: Connection, party: ColumnElement[bool]) -> Sequence[Row[Any]]:
    """The party's accepted results that are not replayed, in groups that no batch of the learner contains."""
    trusted = (db.results.c.verdict == "accepted") & db.results.c.replay.is_(None) & party
    groups = db.groups.c.state.in_(LIVE_GROUPS) & db.groups.c.id.not_in(live_batch_groups)
    return conn.execute(_RESULTS.where(trusted, groups).order_by(db.jobs.c.opened, db.jobs.c.position)).all()


def _reject(conn: Connection, now: Present, policy: Policy, row: Row[Any], why: Rejection, fail: Fail) -> None:
    """Reject the result and return its job to the pool, unless its group has ended for good."""
    now.happened["results_rejected", row.name, why.reason.value] += 1
    values = {"verdict": "rejected", "reason": why.reason.value, "detail": why.detail[:1024]}
    this = (db.results.c.job_id == row.job_id) & (db.results.c.lease_id == row.lease_id)
    conn.execute(update(db.results).where(this).values(segment=None, offset=None, length=None, **values))
    if row.verdict != "accepted":
        return
    # Rejections of the group's other results may have changed its state.
    state = conn.scalar(select(db.groups.c.state).where(db.groups.c.id == row.group_id))
    if state not in LIVE_GROUPS:
        move(conn, "job", db.jobs, row.job_id, "cancelled", reason=why.reason.value)
        return
    if state != "open":
        move(conn, "group", db.groups, row.group_id, "open")
    fail(conn, now, policy, row, why.reason)


def leave_out(conn: Connection, group_id: bytes) -> None:
    """The group is trained now. Its results whose replays are due are not: they end, and are replayed all the same."""
    rows = conn.execute(_RESULTS.where(db.jobs.c.group_id == group_id, db.results.c.replay == DUE)).all()
    for row in rows:
        if row.verdict != "accepted":
            continue
        this = (db.results.c.job_id == row.job_id) & (db.results.c.lease_id == row.lease_id)
        detail = "its replay had not ended when its group was trained"
        late = {"verdict": "rejected", "reason": Reason.UNSCORED.value, "detail": detail}
        conn.execute(update(db.results).where(this).values(**late))
        move(conn, "job", db.jobs, row.job_id, "cancelled", reason="trained without it")
    state = conn.scalar(select(db.groups.c.state).where(db.groups.c.id == group_id))
    if state != "open":
        move(conn, "group", db.groups, group_id, "open")
