"""Transitions of results: judged once, remembered by job and lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Settled
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.result import Result, reward_fault
from trainer_node.ledger.acceptance import Reason, Rejection, Standards, rejection
from trainer_node.ledger.audits.replaying import sampler_of
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.failures.failed_jobs import fail_job
from trainer_node.ledger.job_groups import end_settled, read_groups
from trainer_node.ledger.ledger_rows import (
    BEARER,
    MAX_UNKNOWN,
    Policy,
    Present,
    caller_of,
    move,
    move_all,
)
from trainer_node.ledger.ledger_states import UNSETTLED_JOBS
from trainer_node.ledger.worker_rates import WorkerRates

_LEASES = (
    select(
        db.leases,
        db.jobs.c.state.label("job_state"),
        db.jobs.c.position,
        db.jobs.c.failures,
        db.jobs.c.group_id,
        db.groups.c.state.label("group_state"),
        db.groups.c.purpose,
        db.groups.c.task_hash,
        db.workers.c.device_class,
        db.workers.c.caller,
        db.results.c.digest,
        db.results.c.verdict,
        db.results.c.reason,
        db.results.c.detail,
    )
    .join(db.jobs, db.jobs.c.id == db.leases.c.job_id)
    .join(db.groups, db.groups.c.id == db.jobs.c.group_id)
    .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
    # By the job first: it leads the primary key.
    .outerjoin(db.results, (db.results.c.job_id == db.leases.c.job_id) & (db.results.c.lease_id == db.leases.c.id))
    .where(db.leases.c.id.in_(bindparam("leases", expanding=True)))
    .where(db.leases.c.worker_id == bindparam("worker"))
)
_HELD_OF_JOBS = select(db.leases.c.id).where(
    db.leases.c.job_id.in_(bindparam("jobs", expanding=True)), db.leases.c.state == "held"
)
_NEW_RESULTS = insert(db.results)
_CUT_OFF = insert(db.cut_off_results)
_COUNT_TOKENS = (
    update(db.workers)
    .where(db.workers.c.id == bindparam("worker"))
    .values(accepted_tokens=db.workers.c.accepted_tokens + bindparam("tokens"))
)
_ONE_HELD = (
    select(db.leases.c.id).where(db.leases.c.worker_id == bindparam("worker"), db.leases.c.state == "held").limit(1)
)


class Verdicts(NamedTuple):
    """``given``: of all results, in their order. ``new``: those that this transition has recorded."""

    given: list[Settled]
    new: list[Settled]


class JudgedResult(NamedTuple):
    """``answer``: None while the reward is missing. ``row``: of the lease."""

    answer: Settled | None
    wrong: Rejection | None
    job: Job | None
    row: Row[Any] | None


class _Accepted(NamedTuple):
    result: Result
    job: Job
    row: Row[Any]
    reward: float


def judge_all(
    conn: Connection, now: Present, policy: Policy, worker_id: bytes, handed_in: Sequence[Result]
) -> list[JudgedResult]:
    """For each result the answer that was given before, or the rejection, or neither for a result that would be
    accepted. Raises RefusedError for another body of a lease that is settled.
    """
    lease_ids = [result.lease for result in handed_in]
    mine = conn.execute(_LEASES, {"leases": lease_ids, "worker": worker_id})
    leases = {(bytes(row.job_id), bytes(row.id)): row for row in mine}
    groups = read_groups(conn, {bytes(row.group_id) for row in leases.values()})
    standards = standards_of(now, policy)
    return [_judge(now, standards, one, leases.get((one.job, one.lease)), groups) for one in handed_in]


def standards_of(now: Present, policy: Policy) -> Standards:
    return Standards(
        rule=policy.rule,
        staleness=policy.bounds.staleness,
        vocabulary=policy.vocabulary,
        learner_step=now.step,
        lineage=now.lineage,
        manifests=now.manifests,
        schedules=now.schedules,
        experts=policy.experts,
    )


def _judge(
    now: Present,
    standards: Standards,
    result: Result,
    row: Row[Any] | None,
    groups: Mapping[bytes, Group],
) -> JudgedResult:
    if row is None:
        detail = "the worker has no such lease"
        return JudgedResult(Settled(result.job, result.lease, "rejected", "unknown lease", detail), None, None, None)
    if row.digest is not None:
        if bytes(row.digest) != result.digest():
            raise RefusedError(f"lease {result.lease.hex()} was settled with another result")
        return JudgedResult(Settled(result.job, result.lease, row.verdict, row.reason, row.detail), None, None, None)
    job = job_of(groups[bytes(row.group_id)], row.position, bytes(row.job_id), Version(row.branch, row.oldest))
    wrong = rejection(
        result,
        job,
        standards,
        settled=row.job_state not in UNSETTLED_JOBS or row.group_state != "open",
        in_time=row.state == "held" and now.now_s <= row.expires_s,
        served=Version(row.branch, row.served),
    )
    return JudgedResult(None, wrong, job, row)


def settle_all(
    conn: Connection,
    now: Present,
    policy: Policy,
    rates: WorkerRates,
    append: Callable[[bytes], Place],
    worker_id: bytes,
    handed_in: Sequence[Result],
    rewards: Sequence[float | Rejection | None],
    draw: Callable[[], float],
) -> Verdicts:
    """Record the verdicts. ``rewards``: each result's reward, or why there is none; None for a result that was
    rejected before. ``draw``: as of ``sampler_of``. Raises RetryableError for a result that needs a reward now.
    """
    answers: dict[tuple[bytes, bytes], Settled] = {}
    new: list[Settled] = []
    accepted: dict[bytes, _Accepted] = {}
    rejected: list[tuple[Result, Row[Any], Rejection]] = []
    judged = judge_all(conn, now, policy, worker_id, handed_in)
    for result, one, reward in zip(handed_in, judged, rewards, strict=True):
        if one.answer is not None:
            answers[result.job, result.lease] = one.answer
            continue
        assert one.row is not None
        assert one.job is not None
        wrong = one.wrong or _fault_of(reward, one.job)
        if wrong is None and result.job in accepted:
            wrong = Rejection(Reason.DUPLICATE, "the job has ended")
        if wrong is not None:
            rejected.append((result, one.row, wrong))
        elif reward is None:
            raise RetryableError(f"the result of lease {result.lease.hex()} has no reward yet: send it again")
        else:
            assert not isinstance(reward, Rejection)
            accepted[result.job] = _Accepted(result, one.job, one.row, float(reward))
    _accept_all(conn, now, rates, append, worker_id, list(accepted.values()), _replays(conn, policy, worker_id, draw))
    new += [Settled(one.result.job, one.result.lease, "accepted", None, None) for one in accepted.values()]
    new += [_reject(conn, now, policy, worker_id, result, row, wrong) for result, row, wrong in rejected]
    answers |= {(one.job, one.lease): one for one in new}
    return Verdicts([answers[result.job, result.lease] for result in handed_in], new)


def _fault_of(reward: float | Rejection | None, job: Job) -> Rejection | None:
    """Return why the figure is not a valid reward, or None."""
    if reward is None or isinstance(reward, Rejection):
        return reward
    wrong = reward_fault(reward)
    return None if wrong is None else Rejection(Reason.UNSCORED, f"task {job.task} gives {wrong}")


def _replays(conn: Connection, policy: Policy, worker_id: bytes, draw: Callable[[], float]) -> Callable[[], str | None]:
    """State of the next accepted result's replay."""
    return (lambda: None) if policy.trust is None else sampler_of(conn, policy.trust, worker_id, draw)


def _accept_all(
    conn: Connection,
    now: Present,
    rates: WorkerRates,
    append: Callable[[bytes], Place],
    worker_id: bytes,
    accepted: Sequence[_Accepted],
    replays: Callable[[], str | None],
) -> None:
    if not accepted:
        return
    rows = []
    for result, _, _, reward in accepted:
        place = append(result.to_bytes())
        rows.append(
            {
                "job_id": result.job,
                "lease_id": result.lease,
                "digest": result.digest(),
                "verdict": "accepted",
                "reward": reward,
                "replay": replays(),
                "sampled": result.sampled,
                "settled_step": now.step,
                "oldest_step": result.oldest_step,
                "versions": " ".join(sorted({str(span.version) for span in result.spans})),
                "segment": place.segment,
                "offset": place.offset,
                "length": place.length,
            }
        )
    conn.execute(_NEW_RESULTS, rows)
    cut_off = [one.result for one in accepted if one.result.stop == "length"]
    if cut_off:
        conn.execute(_CUT_OFF, [{"job_id": result.job, "lease_id": result.lease} for result in cut_off])
    move_all(conn, "lease", db.leases, [one.result.lease for one in accepted if one.row.state == "held"], "settled")
    # A late result ends the lease of the worker that plays the job now.
    if late := [one.result.job for one in accepted if one.row.state != "held"]:
        move_all(conn, "lease", db.leases, conn.scalars(_HELD_OF_JOBS, {"jobs": late}).all(), "aborted")
    move_all(conn, "job", db.jobs, [one.result.job for one in accepted], "accepted")
    _measure(conn, now, rates, worker_id, accepted)
    end_settled(conn, now, {bytes(one.row.group_id) for one in accepted})


def _measure(
    conn: Connection, now: Present, rates: WorkerRates, worker_id: bytes, accepted: Sequence[_Accepted]
) -> None:
    conn.execute(_COUNT_TOKENS, {"worker": worker_id, "tokens": sum(one.result.sampled for one in accepted)})
    name = worker_id.hex()
    for result, job, row, _ in accepted:
        kind = (job.task, row.device_class)
        rates.settled(name, kind, now.now_s - row.began_s, result.sampled, caller=caller_of(row))
    rates.end_window(name, now.now_s, still_busy=conn.scalar(_ONE_HELD, {"worker": worker_id}) is not None)


def _reject(
    conn: Connection, now: Present, policy: Policy, worker_id: bytes, result: Result, row: Row[Any], wrong: Rejection
) -> Settled:
    reason = wrong.reason.value
    detail = wrong.detail[:1024]
    conn.execute(
        insert(db.results).values(
            job_id=result.job,
            lease_id=result.lease,
            digest=result.digest(),
            verdict="rejected",
            reason=reason,
            detail=detail,
            sampled=result.sampled,
            settled_step=now.step,
        )
    )
    unknown = wrong.reason is Reason.UNKNOWN and policy.asks_hub
    if wrong.reason.blames or (unknown and _invents_versions(conn, row)):
        blamed = db.workers.c.blamed + 1
        conn.execute(update(db.workers).where(db.workers.c.id == worker_id).values(blamed=blamed))
    # Another result of the same request may have ended the lease, with its group.
    if conn.scalar(select(db.leases.c.state).where(db.leases.c.id == row.id)) == "held":
        move(conn, "lease", db.leases, row.id, "settled")
        fail_job(conn, now, policy, row, wrong.reason, detail)
    return Settled(result.job, result.lease, "rejected", reason, detail)


def _invents_versions(conn: Connection, row: Row[Any]) -> bool:
    """Count a result of a version that the hub does not list. Returns whether the caller has sent too many: a hub that
    forgets a version forgets it once, but no honest engine serves such versions again and again.
    """
    workers, mine = db.workers.c, db.workers.c.id == row.worker_id
    conn.execute(update(db.workers).where(mine).values(unknown_versions=workers.unknown_versions + 1))
    answers = mine if row.caller == BEARER else workers.caller == row.caller
    return int(conn.scalar(select(func.sum(workers.unknown_versions)).where(answers)) or 0) > MAX_UNKNOWN
