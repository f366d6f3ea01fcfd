"""Audits: a random sample of each version's accepted results, and the transitions that find and count them.

Guarantee: each accepted result of a version is in its sample with the same probability, whatever its worker does, and
leaves it at most once. The sample is in memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from sqlalchemy import Connection, select, update

from p2pcast.ground.version import Version
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.ledger_rows import UnknownIdError

MOST = 64
"""Results of one version."""
VERSIONS = 16
"""Newest versions. An auditor's engine serves one of them."""


class SampledLease(NamedTuple):
    job: bytes
    lease: bytes


class Accepted(NamedTuple):
    """``worker``: name."""

    worker: str
    place: Place


@dataclass(slots=True)
class _OfVersion:
    seen: int = 0
    results: list[SampledLease] = field(default_factory=list)


class AuditSample:
    """Thread-safe. ``below(n)`` returns a random integer from 0 to n - 1 that no worker can predict."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self._below = below
        self._versions: dict[Version, _OfVersion] = {}
        self._lock = Lock()

    def offer(self, version: Version, one: SampledLease) -> None:
        """Offer an accepted result sampled entirely by ``version`` (reservoir sampling)."""
        with self._lock:
            of = self._versions.setdefault(version, _OfVersion())
            of.seen += 1
            if len(of.results) < MOST:
                of.results.append(one)
            elif (place := self._below(of.seen)) < MOST:
                of.results[place] = one
            if len(self._versions) > VERSIONS:
                del self._versions[min(self._versions)]

    def take(self, version: Version) -> SampledLease | None:
        with self._lock:
            of = self._versions.get(version)
            if of is None or not of.results:
                return None
            return of.results.pop(self._below(len(of.results)))


def accepted_result(conn: Connection, sampled: SampledLease) -> Accepted | None:
    """Return the accepted result, or None if it is no longer kept."""
    row = conn.execute(
        select(db.results.c.segment, db.results.c.offset, db.results.c.length, db.workers.c.name)
        .join(db.leases, db.leases.c.id == db.results.c.lease_id)
        .join(db.workers, db.workers.c.id == db.leases.c.worker_id)
        .where(
            db.results.c.job_id == sampled.job,
            db.results.c.lease_id == sampled.lease,
            db.results.c.verdict == "accepted",
        )
    ).first()
    return None if row is None else Accepted(row.name, Place(row.segment, row.offset, row.length))


def count(conn: Connection, sampled: SampledLease, *, agrees: bool) -> str:
    """Count an audit and return the worker's name. Raises UnknownIdError."""
    worker = conn.execute(
        select(db.workers.c.id, db.workers.c.name)
        .join(db.leases, db.leases.c.worker_id == db.workers.c.id)
        .where(db.leases.c.id == sampled.lease, db.leases.c.job_id == sampled.job)
    ).first()
    if worker is None:
        raise UnknownIdError(f"no lease {sampled.lease.hex()} of job {sampled.job.hex()} is kept")
    counted = {"audits": db.workers.c.audits + 1}
    if not agrees:
        counted["disagreements"] = db.workers.c.disagreements + 1
    conn.execute(update(db.workers).where(db.workers.c.id == worker.id).values(**counted))
    return str(worker.name)
