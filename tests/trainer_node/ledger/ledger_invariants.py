"""Invariants of the ledger's rows, checked by brute force over a dump of all tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import select

from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger

Rows = dict[str, list[Any]]
LIVE = ("open", "complete", "short")


def dump(store: LedgerStore) -> Rows:
    with store.connection.begin():
        return {name: store.connection.execute(select(table)).all() for name, table in db.metadata.tables.items()}


def check_rows(rows: Rows) -> None:
    """Assert what holds after every transition, whatever happened before."""
    groups = {bytes(row.id): row for row in rows["groups"]}
    jobs_of: dict[bytes, list[Any]] = defaultdict(list)
    for row in rows["jobs"]:
        jobs_of[bytes(row.group_id)].append(row)
    accepted = Counter(bytes(r.job_id) for r in rows["results"] if r.verdict == "accepted")
    assert set(accepted.values()) <= {1}, "a job has two accepted results"
    assert set(accepted) == {bytes(row.id) for row in rows["jobs"] if row.state == "accepted"}
    held = Counter(bytes(row.job_id) for row in rows["leases"] if row.state == "held")
    assert set(held.values()) <= {1}, "a job has two leases"
    assert set(held) == {bytes(row.id) for row in rows["jobs"] if row.state == "leased"}
    for group_id, row in groups.items():
        states = Counter(job.state for job in jobs_of[group_id])
        # A group that is dropped in the pool was never opened.
        assert states.total() == (0 if row.opened is None else row.size)
        assert bool(states["open"] + states["leased"]) == (row.state == "open"), (row.state, states)
        if row.state == "complete":
            assert states["accepted"] == row.size
        if row.state in ("complete", "short", "trained") and row.purpose == "train":
            assert states["accepted"] >= 2
    results = {(bytes(r.job_id), bytes(r.lease_id)): r for r in rows["results"]}
    cut_off = [results[bytes(r.job_id), bytes(r.lease_id)] for r in rows["cut_off_results"]]
    assert all(row.oldest_step is not None for row in cut_off), "a result that was never accepted is cut off"
    _check_batches(rows)


def _check_batches(rows: Rows) -> None:
    live = {bytes(row.id): row for row in rows["batches"] if row.state != "reopened"}
    assert len({row.step for row in live.values()}) == len(live), "a step has two live batches"
    members = Counter(bytes(row.group_id) for row in rows["batch_members"] if bytes(row.batch_id) in live)
    assert set(members.values()) <= {1}, "a group is in two live batches"
    groups = {bytes(row.id): row for row in rows["groups"]}
    for row in rows["batch_members"]:
        batch, group = live.get(bytes(row.batch_id)), groups[bytes(row.group_id)]
        if batch is not None:
            assert group.purpose == "train"
            assert group.state in (("trained",) if batch.state == "trained" else ("complete", "short"))


def check_counts(rows: Rows, ledger: Ledger) -> None:
    """The status, which the database counts, against counts by hand."""
    status = ledger.status()
    applied = {bytes(row.id) for row in rows["batches"] if row.state == "applied"}
    trained = {bytes(row.group_id) for row in rows["batch_members"] if bytes(row.batch_id) in applied}
    ahead = [r for r in rows["groups"] if r.purpose == "train" and r.state in LIVE and bytes(r.id) not in trained]
    assert status["ahead"] == len(ahead)
    for name in ("groups", "jobs", "leases", "batches"):
        assert status[name] == Counter(row.state for row in rows[name])
    assert status["results"] == Counter(row.verdict for row in rows["results"])
    assert status["rejections"] == Counter(row.reason for row in rows["results"] if row.reason is not None)
    lengths = [row.sampled for row in rows["results"] if row.verdict == "accepted"]
    assert status["mean_tokens"] == (round(sum(lengths) / len(lengths), 2) if lengths else None)
