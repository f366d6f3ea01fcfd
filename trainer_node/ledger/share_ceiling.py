"""How many jobs a worker may lease: its share of a batch, as a ceiling. Rules: ``trainer_node.scheduling.shares``.

Guarantees: a ceiling binds only while another worker waits for jobs that it asked for, did not get, and could get. So
no worker that is silent, too old, without work, or content with a few jobs keeps others from theirs. A worker whose
share is 0 gets one job now and then. The measurements that this module reads from memory decide which worker plays
first, never which results count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select

from p2pcast.ground.version import Version
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import MAX_BLAMED, SEEN_S, Policy, Present, admissible, ahead, finished
from trainer_node.ledger.staleness_rule import room
from trainer_node.ledger.worker_rates import WorkerLoads, WorkerRates
from trainer_node.scheduling.shares import Load, jobs_for, split


def plays_training(now: Present, policy: Policy, served: Version) -> bool:
    """Whether results of an engine that serves the version may be trained."""
    return admissible(now, policy, served) and not finished(now, policy.bounds)


def within_share(
    conn: Connection, now: Present, policy: Policy, rates: WorkerRates, worker: Row[Any], wanted: int
) -> int:
    """How many of ``wanted`` jobs the worker may lease now."""
    rates.sees_jobs(now.now_s)
    standing, name = rates.standing(worker.task_hash, now.epoch, now.step, now.now_s), bytes(worker.id).hex()
    if standing is None or rates.lacks(name, standing, now.now_s):
        standing = _standing(conn, now, policy, rates, worker)
        rates.keep_standing(worker.task_hash, standing)
    standing.loads.setdefault(name, Load(0, wanted))
    allowed = jobs_for(name, wanted, standing.shares, standing.loads)
    if allowed == 0 and standing.shares.get(name, 0) == 0 and rates.may_probe(name, now.now_s):
        rates.probed(name, now.now_s)
        return 1
    return allowed


_RECENT = select(db.workers.c.id, db.workers.c.slots, db.workers.c.served_branch, db.workers.c.served_step).where(
    db.workers.c.seen_s > bindparam("since_s"),
    db.workers.c.task_hash == bindparam("task_hash"),
    db.workers.c.blamed < MAX_BLAMED,
    db.workers.c.served_step.is_not(None),
)
_LEASES = select(db.leases.c.worker_id, func.count()).group_by(db.leases.c.worker_id)
_LEASES_OF_BATCH = _LEASES.where(db.leases.c.epoch == bindparam("epoch"), db.leases.c.step == bindparam("step"))
_HELD_LEASES = _LEASES.where(db.leases.c.state == "held")
_LIVE_GROUPS = (
    select(db.groups.c.state, func.count(), func.max(db.groups.c.size))
    .where(
        db.groups.c.purpose == "train",
        db.groups.c.task_hash == bindparam("task_hash"),
        db.groups.c.state.in_(("open", "waiting")),
    )
    .group_by(db.groups.c.state)
)
_OPEN_JOBS = (
    select(func.count())
    .select_from(db.jobs)
    .where(db.jobs.c.state == "open", db.jobs.c.purpose == "train", db.jobs.c.task_hash == bindparam("task_hash"))
)


def _standing(conn: Connection, now: Present, policy: Policy, rates: WorkerRates, asker: Row[Any]) -> WorkerLoads:
    """Shares and loads of the workers of the asker's task. Workers that may not take part have no share."""
    recent = conn.execute(_RECENT, {"since_s": now.now_s - SEEN_S, "task_hash": asker.task_hash})
    peers = {bytes(row.id): (row.slots, Version(row.served_branch, row.served_step)) for row in recent}
    in_batch = _by_worker(conn.execute(_LEASES_OF_BATCH, {"epoch": now.epoch, "step": now.step}))
    held = _by_worker(conn.execute(_HELD_LEASES))
    size, jobs = _jobs_to_lease(conn, now, policy, asker.task_hash, {served for _, served in peers.values()})
    able, loads = [], {}
    newest = now.newest_live(2)
    for peer, (slots, served) in peers.items():
        name = peer.hex()
        if _takes_part(now, policy, newest, served, rates.staged(name)):
            able.append(name)
        free = min(max(0, slots - held.get(peer, 0)), rates.waits_for(name, now.now_s))
        loads[name] = Load(in_batch.get(peer, 0), min(free, jobs[served]))
    loads.setdefault(bytes(asker.id).hex(), Load(0, 1))
    shares = split(policy.bounds.batch_groups * size, rates.throughputs.of(able))
    return WorkerLoads(now.epoch, now.step, now.now_s, shares, loads)


def _takes_part(now: Present, policy: Policy, newest: list[Version], served: Version, staged: Version | None) -> bool:
    """Algorithm 1's set. ``strict``: the newest version, or the one before with the newest staged. ``bounded``: any
    version that has room.
    """
    if policy.rule == "bounded" or not newest:
        return admissible(now, policy, served)
    return served == newest[-1] or (staged == newest[-1] and served == newest[0])


def _jobs_to_lease(
    conn: Connection, now: Present, policy: Policy, task_hash: bytes, served: set[Version]
) -> tuple[int, dict[Version, int]]:
    """The size of the largest group, and how many jobs an engine of each version could be given."""
    live = conn.execute(_LIVE_GROUPS, {"task_hash": task_hash})
    groups = {row.state: (int(row[1]), int(row[2])) for row in live}
    size = max((size for _, size in groups.values()), default=1)
    count = int(conn.scalar(_OPEN_JOBS, {"task_hash": task_hash}) or 0)
    opened, waiting = ahead(conn), groups.get("waiting", (0, 0))[0]
    jobs = {}
    for version in served:
        playable = plays_training(now, policy, version)
        more = min(waiting, room(policy.bounds, opened, version.step, now.step)) * size
        jobs[version] = count + more if playable else 0
    return size, jobs


def _by_worker(rows: Iterable[Any]) -> dict[bytes, int]:
    return {bytes(worker): int(count) for worker, count in rows}


def count_publication(conn: Connection, now: Present, policy: Policy, rates: WorkerRates, version: Version) -> None:
    """A version is published: the estimates decay of workers that could not take part in the publication before it."""
    if not now.lineage.is_live(version):
        return
    serving = select(db.workers.c.id, db.workers.c.served_branch, db.workers.c.served_step)
    rows = conn.execute(serving.where(db.workers.c.served_step.is_not(None))).all()
    newest, able = now.newest_live(2), set()
    for row in rows:
        name, served = bytes(row.id).hex(), Version(row.served_branch, row.served_step)
        # No engine serves the new version yet, so the version before it counts too.
        if served in newest[-1:] or _takes_part(now, policy, newest, served, rates.staged(name)):
            able.add(name)
    rates.published(able)
