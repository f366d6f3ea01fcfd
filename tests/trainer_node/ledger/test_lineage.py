from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from trainer_node.ledger.lineage import Fork, Lineage


def test_versions_of_the_old_branch_are_live_up_to_the_fork():
    lineage = Lineage(0, {}).forked(1, 5)
    assert lineage.is_live(Version(0, 5))
    assert not lineage.is_live(Version(0, 6))
    assert lineage.is_live(Version(1, 6))
    assert lineage.is_live(Version(1, 10**6))


def test_a_fork_before_an_earlier_fork_ends_that_branch_wholly():
    """Branch 1 began at 0.10; the learner then resumed from step 7, which is on branch 0."""
    lineage = Lineage(0, {}).forked(1, 10).forked(2, 7)
    assert lineage.is_live(Version(0, 7))
    assert not lineage.is_live(Version(0, 8))
    assert not lineage.is_live(Version(1, 11))


def test_a_learner_that_begins_anew_descends_from_no_version():
    lineage = Lineage(0, {}).forked(1, 4).begun(2)
    assert lineage.is_live(Version(2, 0))
    assert not any(lineage.is_live(Version(branch, 0)) for branch in (0, 1))
    assert not lineage.forked(3, 5).is_live(Version(1, 4))
    with pytest.raises(UsageError, match="branch 1 is not newer than branch 2"):
        lineage.begun(1)


def test_a_branch_that_is_not_newer_is_refused():
    with pytest.raises(UsageError, match="branch 1 is not newer than branch 2"):
        Lineage(2, {2: Fork(0, 3)}).forked(1, 4)
    with pytest.raises(UsageError):
        Lineage(0, {}).forked(0, 4)


def lineage_of(lineage):
    """The live branch and its ancestors, but for those that a later fork cut off before their first step."""
    found, branch = {lineage.branch}, lineage.branch
    last = float("inf")
    while branch in lineage.forks:
        branch, step = lineage.forks[branch]
        last = min(last, step)
        if branch not in lineage.forks or lineage.forks[branch].step <= last:
            found.add(branch)
    return found


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12))
def test_liveness_matches_the_history_of_weights(runs):
    """Each run trains some steps on its branch and is then resumed some steps back. ``way`` is the truth: for each
    step, the branch whose weights the learner has gone through."""
    lineage, way, began = Lineage(0, {}), [0], {}
    for number, (steps, back) in enumerate(runs, 1):
        way += [lineage.branch] * steps
        at = max(0, len(way) - 1 - back)
        way = way[: at + 1]
        lineage, began[number] = lineage.forked(number, at), at
    for branch in range(len(runs) + 1):
        for step in range(len(way) + 8):
            # The first version of a branch may be the weights of the step from which it was resumed.
            live = way[step] == branch if step < len(way) else branch == lineage.branch
            resumed = began.get(branch) == step and step < len(way) and branch in lineage_of(lineage)
            assert lineage.is_live(Version(branch, step)) == (live or resumed)
