"""Facts that hold at the end of a run of which a part has died, checked against an undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from p2pcast.ground.version import Version
from tests.trainer_node.learning.learner_stage import STEPS
from tests.trainer_node.learning.whole_run import STALENESS, WholeRun
from tests.trainer_node.ledger.ledger_invariants import check_rows

Trained = list[list[tuple[bytes, tuple[int, ...]]]]
"""For each batch of the lineage its rollouts, in order: their groups and tokens."""


def check(run: WholeRun, undisturbed: WholeRun) -> None:
    """For results that depend on the job alone: abandoned versions have the weights of their step too."""
    check_end(run, undisturbed)
    by_step = {version.step: digest for version, digest in undisturbed.digests.items()}
    assert by_step.keys() == set(range(STEPS + 1))
    for version, digest in run.digests.items():
        assert digest == by_step[version.step], f"version {version} has other weights than the undisturbed run's"


def check_end(run: WholeRun, undisturbed: WholeRun) -> None:
    """Both runs trained on the same results in the same order, and end with the same weights, at the hub too."""
    check_rows(run.rows)
    assert check_lineage(run) == check_lineage(undisturbed), "other data, or in another order"
    assert run.state.keys() == undisturbed.state.keys()
    differing = [name for name in undisturbed.state if not torch.equal(run.state[name], undisturbed.state[name])]
    assert not differing, f"other weights: {differing}"
    assert run.digests[run.end] == undisturbed.digests[undisturbed.end]


def check_lineage(run: WholeRun) -> Trained:
    """Each step has one batch, nothing is trained twice or stale, no job is lost, and ledger, learner and hub agree on
    the branch. Returns the data that were trained on.
    """
    rows = run.rows
    (meta,) = rows["meta"]
    assert Version(meta.branch, meta.step) == run.end
    assert run.end.step == STEPS
    assert max(run.digests) == run.end, "the hub's newest version is not the run's end"
    forks = {row.branch: (row.parent, row.step) for row in rows["forks"]}
    batches = {bytes(row.id): row.step for row in sorted(rows["batches"], key=_step) if row.state == "trained"}
    assert {row.state for row in rows["batches"]} <= {"trained", "reopened"}
    assert list(batches.values()) == list(range(STEPS)), "a batch is lost, or trained twice"
    states = {bytes(row.id): row.state for row in rows["jobs"]}
    accepted = {bytes(row.job_id): row for row in rows["results"] if row.verdict == "accepted"}
    groups, jobs = set(), set()
    found: Trained = []
    for ident, step in batches.items():
        batch = run.given[ident]
        found.append([])
        for group in batch.groups:
            assert group.group.id not in groups, "a group is trained twice"
            groups.add(group.group.id)
            for rollout in group.rollouts:
                result = rollout.result
                assert result.job not in jobs, "a result is trained twice"
                jobs.add(result.job)
                assert states[result.job] == "accepted"
                assert bytes(accepted[result.job].lease_id) == result.lease, "another result was trained"
                for span in result.spans:
                    assert is_live(span.version, meta.branch, forks), f"{span.version} was left behind"
                    assert step - span.version.step <= STALENESS
                found[-1].append((group.group.id, tuple(map(int, result.token_ids))))
    members = {(bytes(row.batch_id), bytes(row.group_id)) for row in rows["batch_members"]}
    assert {group for batch, group in members if batch in batches} == groups
    assert {bytes(row.id) for row in rows["groups"] if row.state == "trained"} == groups
    assert not [state for state in states.values() if state in ("open", "leased")], "a job is lost"
    assert not [row for row in rows["leases"] if row.state == "held"]
    return found


def is_live(version: Version, branch: int, forks: Mapping[int, tuple[int, int]]) -> bool:
    """Whether the end of ``branch`` descends from the version. ``forks``: parent and step of each branch."""
    last = STEPS
    while version.branch != branch and branch in forks:
        branch, step = forks[branch]
        last = min(last, step)
    return version.branch == branch and version.step <= last


def _step(row: Any) -> int:
    return int(row.step)
