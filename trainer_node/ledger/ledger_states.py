"""States of groups, jobs, leases and batches, and the changes between them. Pure.

Every change of a state goes through ``validate``. A job that is accepted may open again only when its result is
cancelled. Reasons: the learner leaves its branch, its bytes are damaged, or its reward is not trusted any more. The
same holds for groups that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pcast.ground.errors import IntegrityError

GROUP: Mapping[str, frozenset[str]] = {
    "waiting": frozenset({"open", "dropped"}),
    "open": frozenset({"complete", "short", "dropped"}),
    "complete": frozenset({"open", "dropped", "trained"}),
    "short": frozenset({"open", "dropped", "trained"}),
    "trained": frozenset({"complete", "short"}),
    "dropped": frozenset(),
}
"""``waiting``: in the pool; dropped there if no engine serves the version of an evaluation. ``complete``: every job
accepted. ``short``: at least two. ``trained``: in a checkpoint.
"""
JOB: Mapping[str, frozenset[str]] = {
    "open": frozenset({"leased", "accepted", "rejected", "cancelled"}),
    "leased": frozenset({"open", "accepted", "rejected", "cancelled"}),
    "accepted": frozenset({"open", "cancelled", "rejected"}),
    "rejected": frozenset(),
    "cancelled": frozenset(),
}
"""From ``open`` to ``accepted`` or ``rejected``: a result, or the job's fault, that comes after its lease.
``cancelled``: its group was dropped.
"""
LEASE: Mapping[str, frozenset[str]] = {
    "held": frozenset({"settled", "expired", "returned", "aborted"}),
    "expired": frozenset(),
    "returned": frozenset(),
    "aborted": frozenset(),
    "settled": frozenset(),
}
BATCH: Mapping[str, frozenset[str]] = {
    "cut": frozenset({"applied", "trained", "reopened"}),
    "applied": frozenset({"trained", "reopened"}),
    "trained": frozenset({"reopened"}),
    "reopened": frozenset(),
}
TABLES = {"group": GROUP, "job": JOB, "lease": LEASE, "batch": BATCH}
LIVE_GROUPS = ("open", "complete", "short")
"""Opened, and neither trained nor dropped."""
UNSETTLED_JOBS = ("open", "leased")


def validate(kind: str, old: str, new: str) -> None:
    """Raises IntegrityError unless the kind's table allows the change."""
    if new not in TABLES[kind][old]:
        raise IntegrityError(f"the ledger may not change a {kind} from {old} to {new}")


def sources(kind: str, new: str) -> tuple[str, ...]:
    """Return the states that may change to ``new``."""
    return tuple(old for old, targets in TABLES[kind].items() if new in targets)
