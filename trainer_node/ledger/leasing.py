"""Transitions of leases: begun, renewed, given back, expired."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, bindparam, func, insert, or_, select, text, update

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.ledger_api.worker_api import HeldLease, Leased
from p2pcast.rollouts.job import job_of
from p2pcast.rollouts.return_reason import Returned
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.drained_workers import DrainedWorkers
from trainer_node.ledger.failures.failed_jobs import fail_returned
from trainer_node.ledger.job_groups import (
    PINNED,
    count_stale_ending,
    is_evaluated,
    open_groups,
    playable_groups,
    read_groups,
)
from trainer_node.ledger.ledger_rows import (
    BEARER,
    MAX_BLAMED,
    MAX_STALE_ENDINGS,
    OTHERS_FIRST_S,
    Policy,
    Present,
    UnknownIdError,
    admissible,
    caller_of,
    callers_seen,
    finished,
    move,
    move_all,
)
from trainer_node.ledger.share_ceiling import plays_training, within_share
from trainer_node.ledger.worker_rates import LeaseOutcome, WorkerRates
from trainer_node.scheduling.served_versions import KnownEngine, believed

_OPEN = text("jobs.state = 'open'")
"""Not a parameter: PostgreSQL uses a partial index only for a statement that repeats its condition."""
MAX_BEATEN = 16384
"""Leases of the heartbeats of one transition."""

_WORKER = select(db.workers).where(db.workers.c.session == bindparam("session"))
_SERVES = (
    update(db.workers)
    .where(db.workers.c.session == bindparam("of_session"))
    .values(served_branch=bindparam("branch"), served_step=bindparam("step"), seen_s=bindparam("now_s"))
    .returning(db.workers)
)
_HELD = (
    select(func.count())
    .select_from(db.leases)
    .where(db.leases.c.worker_id == bindparam("worker"), db.leases.c.state == "held")
)
_BLAMED = select(func.sum(db.workers.c.blamed)).where(db.workers.c.caller == bindparam("caller"))
_OPEN_JOBS = (
    select(db.jobs.c.id, db.jobs.c.position, db.jobs.c.group_id, db.jobs.c.failed_by, db.jobs.c.failed_s)
    .where(_OPEN, db.jobs.c.purpose == bindparam("purpose"), db.jobs.c.task_hash == bindparam("task_hash"))
    .order_by(db.jobs.c.opened, db.jobs.c.position)
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True, of=db.jobs)
)
_NOT_FAILED = or_(
    db.jobs.c.failed_by.is_(None),
    db.jobs.c.failed_by != bindparam("caller"),
    db.jobs.c.failed_s <= bindparam("since_s"),
)
"""Jobs that the caller has not just failed, or kept too long."""
_JOBS: Mapping[str, Select[Any]] = {"train": _OPEN_JOBS, "evaluate": _OPEN_JOBS.join(db.groups).where(PINNED)}
_OTHER_JOBS = {purpose: jobs.where(_NOT_FAILED) for purpose, jobs in _JOBS.items()}
_NEW_LEASES = insert(db.leases)
_OVER = (
    select(db.leases, db.jobs.c.group_id, db.workers.c.device_class, db.workers.c.name)
    .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
    .where(db.leases.c.state == "held", db.leases.c.expires_s < bindparam("now_s"))
    .with_for_update(skip_locked=True, of=db.leases)
)
_SEEN = (
    update(db.workers)
    .where(db.workers.c.session.in_(bindparam("sessions", expanding=True)))
    .values(seen_s=bindparam("now_s"))
    .returning(db.workers.c.id, db.workers.c.session)
)
_BEATEN = (
    select(db.leases, db.jobs.c.group_id, db.jobs.c.purpose)
    .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    .where(db.leases.c.id.in_(bindparam("ids", expanding=True)))
)
_RENEW = (
    update(db.leases)
    # The lease may have been ended with its group, by another lease of the heartbeats.
    .where(db.leases.c.id == bindparam("lease"), db.leases.c.state == "held")
    .values(tokens=bindparam("sampled"), expires_s=bindparam("until_s"))
)


class Grant(NamedTuple):
    """``exhausted``: whether no further job could be leased now to any worker whose engine serves the same version."""

    leases: list[Leased]
    exhausted: bool = False


class Beat(NamedTuple):
    """One heartbeat: a worker's session, and for each of its leases the tokens sampled so far."""

    session: bytes
    tokens: Mapping[bytes, int]


def worker_of(conn: Connection, session: bytes) -> Row[Any]:
    """Return the row of the session's worker. Raises UnknownIdError."""
    row = conn.execute(_WORKER, {"session": session}).first()
    if row is None:
        raise unknown_session()
    return row


def unknown_session() -> UnknownIdError:
    return UnknownIdError("no worker has this session: register again")


def held_by(conn: Connection, name: str) -> int:
    """Return the number of leases held by the workers of this name."""
    held = select(func.count()).select_from(db.leases).join(db.workers, db.workers.c.id == db.leases.c.worker_id)
    return int(conn.scalar(held.where(db.workers.c.name == name, db.leases.c.state == "held")) or 0)


def lease(
    conn: Connection,
    now: Present,
    policy: Policy,
    rates: WorkerRates,
    new_id: Callable[[], bytes],
    drained: DrainedWorkers,
    *,
    session: bytes,
    slots: int,
    served: Version,
    manifest: bytes,
    staged: Version | None,
    known: KnownEngine | None,
) -> Grant:
    """Lease up to ``slots`` jobs that the engine may play. ``served``, ``staged``: as reported by the worker.
    ``known``: as the hub reports, or None if it does not know the engine. Raises RefusedError if the worker was blamed
    too often, or the manifest is not the version's.
    """
    if not 1 <= slots <= MAX_LIST:
        raise UsageError(f"slots is a number from 1 to {MAX_LIST}")
    engine = believed(served, staged, known)
    branch, step = (None, None) if engine.served is None else engine.served
    asks = {"of_session": session, "branch": branch, "step": step, "now_s": now.now_s}
    worker = conn.execute(_SERVES, asks).first()
    if worker is None:
        raise unknown_session()
    if drained.left_s(worker.name, now.now_s) > 0:
        return Grant([])
    name = bytes(worker.id).hex()
    rates.asks(name, now.now_s, engine.staged)
    if (blamed := _blamed(conn, worker)) >= MAX_BLAMED:
        raise RefusedError(f"{blamed} malformed or forged results: this worker gets no more leases")
    if served not in now.manifests:
        return Grant([])
    if now.manifests[served] != manifest:
        raise RefusedError(f"version {served} has another manifest than the engine's")
    if engine.served is None or engine.served not in now.manifests:
        return Grant([])
    free = worker.slots - int(conn.scalar(_HELD, {"worker": worker.id}) or 0)
    wanted = min(slots, free)
    if wanted < 1:
        return Grant([])
    # A request of the largest size stands for all free slots: the next request asks for the rest.
    asked = free if slots == MAX_LIST else wanted
    taker = _Taker(conn, now, policy, rates, new_id, worker, engine.served)
    # A job that names one version is for an engine that is known to serve it: another version's result would be lost.
    evaluating = engine.agreed and is_evaluated(conn, served)
    taken, left = taker.take("evaluate", wanted) if evaluating else ([], False)
    wanted -= len(taken)
    if wanted and (engine.agreed or policy.rule == "bounded") and plays_training(now, policy, engine.served):
        wanted = within_share(conn, now, policy, rates, worker, wanted)
        training, left_to_train = taker.take("train", wanted) if wanted else ([], True)
        wanted -= len(training)
        taken += training
        left = left or left_to_train
        begun = LeaseOutcome(len(training), missing=max(0, asked - len(taken)), emptied=wanted > 0)
        rates.began(name, now.now_s, begun, worker.task_hash)
    # Of a worker that was not offered everything, or plays another task, nothing follows for the others.
    offered = engine.agreed and worker.task_hash == policy.task_hash
    return Grant(taken, exhausted=offered and not taken and not left)


def _blamed(conn: Connection, worker: Row[Any]) -> int:
    """Count per certificate, not per name: a new name does not clear the record."""
    if worker.caller == BEARER:
        return int(worker.blamed)
    return int(conn.scalar(_BLAMED, {"caller": worker.caller}) or 0)


class _Taker(NamedTuple):
    """Leases jobs to one worker."""

    conn: Connection
    now: Present
    policy: Policy
    rates: WorkerRates
    new_id: Callable[[], bytes]
    worker: Row[Any]
    served: Version

    def take(self, purpose: str, most: int) -> tuple[list[Leased], bool]:
        """Lease at most ``most`` jobs; open groups if there are too few. Whether there were jobs at the last look,
        these or others.
        """
        taken, left = self._begin(purpose, most)
        missing, task_hash = most - len(taken), self.worker.task_hash
        if missing and open_groups(
            self.conn, self.now, self.policy.bounds, self.served, purpose, task_hash, self.new_id, missing
        ):
            more, left = self._begin(purpose, missing)
            taken += more
        return taken, left

    def _next_jobs(self, purpose: str, most: int) -> tuple[Sequence[Any], bool]:
        """Return open jobs of open groups, and whether there are any open jobs at all. A job that the caller has just
        failed, or kept too long, is left to others.
        """
        me, since_s = caller_of(self.worker), self.now.now_s - OTHERS_FIRST_S
        wanted = {"purpose": purpose, "task_hash": self.worker.task_hash, "most": most}
        if purpose == "evaluate":
            wanted |= self.served._asdict()
        rows = self.conn.execute(_JOBS[purpose], wanted).all()
        if not any(row.failed_by == me and row.failed_s > since_s for row in rows):
            return rows, bool(rows)
        if callers_seen(self.conn, self.now, bytes(self.worker.task_hash)) <= {me}:
            return rows, True
        return self.conn.execute(_OTHER_JOBS[purpose], wanted | {"caller": me, "since_s": since_s}).all(), True

    def _begin(self, purpose: str, most: int) -> tuple[list[Leased], bool]:
        rows, left = self._next_jobs(purpose, most)
        if not rows:
            return [], left
        now, served = self.now, self.served
        groups = playable_groups(self.conn, now, {bytes(row.group_id) for row in rows})
        rows = [row for row in rows if bytes(row.group_id) in groups]
        if not rows:
            return [], left
        oldest = served.step if self.policy.rule == "strict" else max(0, now.step - self.policy.bounds.staleness)
        # Evaluation may pin a version older than training would accept.
        oldest = min(oldest, served.step)
        begun, leases = [], []
        terms: dict[tuple[str, int], tuple[float, float]] = {}
        for row in rows:
            group = groups[bytes(row.group_id)]
            kind = group.task, group.max_tokens
            if kind not in terms:
                terms[kind] = self.rates.terms((group.task, self.worker.device_class), group.max_tokens)
            lasts_s, latest = terms[kind]
            lease_id = self.new_id()
            begun.append(
                {
                    "id": lease_id,
                    "job_id": row.id,
                    "worker_id": self.worker.id,
                    "state": "held",
                    "epoch": now.epoch,
                    "step": now.step,
                    "branch": served.branch,
                    "served": served.step,
                    "oldest": oldest,
                    "began_s": now.now_s,
                    "lasts_s": lasts_s,
                    "expires_s": now.now_s + lasts_s,
                    "latest_s": now.now_s + latest,
                    "tokens": 0,
                }
            )
            job = job_of(group, row.position, bytes(row.id), Version(served.branch, oldest))
            leases.append(Leased(lease_id, job, lasts_s, latest))
        move_all(self.conn, "job", db.jobs, [row.id for row in rows], "leased")
        self.conn.execute(_NEW_LEASES, begun)
        return leases, True


def heartbeats(
    conn: Connection, now: Present, policy: Policy, rates: WorkerRates, beats: Sequence[Beat]
) -> list[list[HeldLease] | None]:
    """Renew leases whose token count has grown, and abort those whose results could not be accepted. Returns each
    heartbeat's leases, or None for an unknown session.
    """
    if sum(len(beat.tokens) for beat in beats) > MAX_BEATEN:
        raise UsageError(f"more than {MAX_BEATEN} leases in heartbeats")
    expire(conn, now, rates)
    seen = conn.execute(_SEEN, {"sessions": [beat.session for beat in beats], "now_s": now.now_s})
    workers = {bytes(row.session): bytes(row.id) for row in seen}
    sampled: dict[bytes, int] = {}
    for beat in beats:
        if beat.session in workers:
            sampled |= {lease: max(tokens, sampled.get(lease, 0)) for lease, tokens in beat.tokens.items()}
    mine = {(workers[beat.session], lease) for beat in beats if beat.session in workers for lease in beat.tokens}
    named = conn.execute(_BEATEN, {"ids": list(sampled)}) if sampled else ()
    found = [row for row in named if (bytes(row.worker_id), bytes(row.id)) in mine]
    rows = {bytes(row.id): row for row in found}
    ended = {lease for lease, row in rows.items() if row.state == "held" and _hopeless(now, policy, row)}
    for lease_id in ended:
        _abort(conn, now, policy, rows[lease_id])
    renewed = _renew(conn, now, {i: row for i, row in rows.items() if i not in ended and row.state == "held"}, sampled)
    return [_answers(now, beat, workers.get(beat.session), rows, ended, renewed) for beat in beats]


def _renew(
    conn: Connection, now: Present, held: Mapping[bytes, Row[Any]], sampled: Mapping[bytes, int]
) -> dict[bytes, float]:
    """Extend the leases whose token count has grown, and return their new expiry times."""
    renewed = {
        lease_id: float(max(row.expires_s, min(now.now_s + row.lasts_s, row.latest_s)))
        for lease_id, row in held.items()
        if sampled[lease_id] > row.tokens
    }
    if renewed:
        conn.execute(_RENEW, [{"lease": i, "sampled": sampled[i], "until_s": s} for i, s in renewed.items()])
    return renewed


def _answers(
    now: Present,
    beat: Beat,
    worker: bytes | None,
    rows: Mapping[bytes, Row[Any]],
    ended: Collection[bytes],
    renewed: Mapping[bytes, float],
) -> list[HeldLease] | None:
    if worker is None:
        return None
    mine = {lease_id: row for lease_id in beat.tokens if (row := rows.get(lease_id)) and row.worker_id == worker}
    return [_held(now, lease_id, mine.get(lease_id), ended, renewed) for lease_id in beat.tokens]


def _held(
    now: Present, lease_id: bytes, row: Row[Any] | None, ended: Collection[bytes], renewed: Mapping[bytes, float]
) -> HeldLease:
    if row is None or row.state == "expired":
        return HeldLease(lease_id, "unknown", 0.0)
    if row.state != "held" or lease_id in ended:
        return HeldLease(lease_id, "abort", 0.0)
    return HeldLease(lease_id, "held", max(0.0, renewed.get(lease_id, row.expires_s) - now.now_s))


def _hopeless(now: Present, policy: Policy, row: Row[Any]) -> bool:
    """Whether no result of this lease could be trained."""
    if row.purpose != "train":
        return False
    return finished(now, policy.bounds) or not admissible(now, policy, Version(row.branch, row.served))


def _abort(conn: Connection, now: Present, policy: Policy, row: Row[Any]) -> None:
    held = select(db.leases.c.state).where(db.leases.c.id == row.id)
    if conn.scalar(held) != "held":
        return  # another lease of the request has dropped the group
    move(conn, "lease", db.leases, row.id, "aborted")
    move(conn, "job", db.jobs, row.job_id, "open")
    if not finished(now, policy.bounds):
        count_stale_ending(conn, now, row.group_id, MAX_STALE_ENDINGS)


_RETURNED = (
    select(
        db.leases,
        db.jobs.c.group_id,
        db.jobs.c.task_hash,
        db.workers.c.caller,
    )
    .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
    .where(db.leases.c.id.in_(bindparam("leases", expanding=True)), db.leases.c.worker_id == bindparam("worker"))
    .where(db.leases.c.state.in_(("held", "expired")))
)


def give_back(
    conn: Connection,
    now: Present,
    rates: WorkerRates,
    session: bytes,
    lease_ids: Sequence[bytes],
    why: Mapping[bytes, Returned],
) -> None:
    """Return unfinished leases to the pool. Leases that are not this worker's, or have ended, are ignored. A fault of
    the job counts even if its lease has expired.
    """
    if len(lease_ids) > MAX_LIST:
        raise UsageError(f"{len(lease_ids)} leases in one request, and {MAX_LIST} are allowed")
    worker = worker_of(conn, session)
    rows = conn.execute(_RETURNED, {"leases": list(lease_ids), "worker": worker.id}).all()
    held = [row for row in rows if row.state == "held"]
    rates.gives_back(bytes(worker.id).hex())
    move_all(conn, "lease", db.leases, [row.id for row in held], "returned")
    faults = {bytes(row.id): one for row in rows if (one := why.get(bytes(row.id))) and one.reason.fails_job}
    move_all(conn, "job", db.jobs, [row.job_id for row in held if bytes(row.id) not in faults], "open")
    for row in held:
        one = why.get(bytes(row.id))
        now.happened["leases_returned", worker.name, "not stated" if one is None else one.reason.value] += 1
    for row in rows:
        if bytes(row.id) in faults:
            fail_returned(conn, now, row, faults[bytes(row.id)])


def give_up(conn: Connection, worker_id: bytes, playing: Collection[bytes]) -> None:
    """Handle a worker's restart: return its jobs to the pool at once, except those it is still playing."""
    held = select(db.leases.c.id, db.leases.c.job_id)
    rows = conn.execute(held.where(db.leases.c.worker_id == worker_id, db.leases.c.state == "held")).all()
    rows = [row for row in rows if bytes(row.id) not in playing]
    move_all(conn, "lease", db.leases, [row.id for row in rows], "returned")
    move_all(conn, "job", db.jobs, [row.job_id for row in rows], "open")


_OVERDUE = (
    select(db.leases.c.id, db.leases.c.job_id, db.leases.c.worker_id, db.workers.c.caller, db.workers.c.name)
    .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
    .where(db.leases.c.state == "held", db.jobs.c.purpose == "train", db.leases.c.began_s < bindparam("since_s"))
    .order_by(db.leases.c.began_s)
)


def are_overdue(conn: Connection, now: Present, overdue_s: float) -> bool:
    """Whether ``release_overdue`` would end any lease."""
    return conn.execute(_OVERDUE.limit(1), {"since_s": now.now_s - overdue_s}).first() is not None


def release_overdue(conn: Connection, now: Present, overdue_s: float) -> int:
    """The learner waits: end the leases that are held for ``overdue_s``, far longer than results take, so that other
    callers play their jobs. A result that comes all the same counts if it is the first of its job. Returns how many
    ended.
    """
    over = _OVERDUE.limit(MAX_LIST).with_for_update(skip_locked=True, of=db.leases)
    rows = conn.execute(over, {"since_s": now.now_s - overdue_s}).all()
    move_all(conn, "lease", db.leases, [row.id for row in rows], "expired")
    for row in rows:
        now.happened["leases_expired", row.name] += 1
        move(conn, "job", db.jobs, row.job_id, "open", failed_by=caller_of(row), failed_s=now.now_s)
    return len(rows)


def expire(conn: Connection, now: Present, rates: WorkerRates) -> int:
    """End expired leases and return their jobs to the pool. Returns how many ended."""
    rows = conn.execute(_OVER, {"now_s": now.now_s}).all()
    if not rows:
        return 0
    move_all(conn, "lease", db.leases, [row.id for row in rows], "expired")
    move_all(conn, "job", db.jobs, [row.job_id for row in rows], "open")
    groups = read_groups(conn, {bytes(row.group_id) for row in rows})
    for row in rows:
        now.happened["leases_expired", row.name] += 1
        kind = (groups[bytes(row.group_id)].task, row.device_class)
        rates.expired(bytes(row.worker_id).hex(), kind, row.expires_s - row.began_s)
    return len(rows)
