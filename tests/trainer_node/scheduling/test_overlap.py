"""The overlap formulas against a simulation of the execution that ECHO-2's appendix B assumes."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from trainer_node.scheduling.overlap import (
    RolloutPace,
    bubble_ratio,
    bubble_ratio_within,
    least_rollouts_per_s,
    least_rollouts_per_s_within,
    overlaps,
    rollouts_from_newest,
    worst_staleness,
    worst_staleness_when_overlapping,
)

PACES = st.builds(
    RolloutPace,
    train_s=st.floats(0.5, 2000),
    broadcast_s=st.floats(0, 3000),
    rollouts=st.integers(1, 2000),
    steps=st.integers(1, 8),
    trained_share=st.floats(0.2, 1),
)


@given(PACES)
def test_least_capacity_is_where_overlap_begins(pace):
    if pace.spare_s <= 1e-6:
        assert not overlaps(pace, 1e12) or pace.spare_s > 0
        return
    least = least_rollouts_per_s(pace)
    assert overlaps(pace, least * 1.001)
    assert not overlaps(pace, least * 0.999)
    assert bubble_ratio(pace, least * 1.001) == 0
    assert bubble_ratio(pace, least * 0.999) > 0


@given(PACES, st.floats(0.01, 100))
def test_bubble_ratio_equals_the_idle_share_of_periods(pace, rate):
    """Period by period: κ steps of training at least, and all rollouts after the broadcast."""
    ready = pace.broadcast_s + pace.needed_rollouts / rate
    train = pace.steps * pace.train_s
    idle = max(0.0, ready - train)
    assert bubble_ratio(pace, rate) == pytest.approx(idle / (idle + train), abs=1e-9)
    assert bubble_ratio(pace, 0) == 1


@given(PACES, st.floats(0.01, 100))
def test_worst_staleness_counts_steps_until_a_full_batch_of_the_newest_version(pace, rate):
    made = 1
    while rollouts_from_newest(pace, rate, made) * pace.trained_share < pace.rollouts * (1 - 1e-9):
        made += 1
        assume(made < 10_000)
    assert worst_staleness(pace, rate) in (pace.steps + made - 1, pace.steps + made)


@given(PACES, st.floats(1.001, 5))
def test_bound_under_overlap_holds_for_every_capacity_that_overlaps(pace, more):
    assume(pace.spare_s > 1e-6)
    rate = least_rollouts_per_s(pace) * more
    assert worst_staleness(pace, rate) <= worst_staleness_when_overlapping(pace)


def test_the_common_case_of_the_paper_stays_within_three_steps():
    """κ = 2 (equation 13)."""
    pace = RolloutPace(train_s=1500, broadcast_s=1400, rollouts=512, steps=2)
    assert worst_staleness_when_overlapping(pace) == 3
    assert math.isclose(least_rollouts_per_s(pace), 1024 / 1600)


def test_a_broadcast_longer_than_the_period_is_explained():
    with pytest.raises(UsageError, match=r"a broadcast takes 30 s, and a version is published every 2 steps of 10 s"):
        least_rollouts_per_s(RolloutPace(train_s=10, broadcast_s=30, rollouts=8, steps=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_s": 0.0},
        {"train_s": math.nan},
        {"broadcast_s": -1.0},
        {"broadcast_s": math.inf},
        {"rollouts": 0},
        {"steps": 0},
        {"trained_share": 0.0},
        {"trained_share": 1.5},
    ],
)
def test_impossible_measurements_are_refused(wrong):
    with pytest.raises(UsageError):
        RolloutPace(**{"train_s": 1.0, "broadcast_s": 1.0, "rollouts": 1, **wrong})


def stepped(pace: RolloutPace, staleness: int, rollouts_per_s: float, steps: int) -> list[float]:
    """The beginning of each learner step, when batches are made one after another, each with the oldest version that
    its staleness allows.
    """
    each_s = pace.rollouts / pace.trained_share / rollouts_per_s
    begins: list[float] = []
    served = {0: 0.0}
    ready_s = ended_s = 0.0
    for step in range(steps):
        version = pace.steps * math.ceil(max(0, step - staleness) / pace.steps)
        ready_s = max(ready_s, served[version]) + each_s
        begins.append(max(ready_s, ended_s))
        ended_s = begins[-1] + pace.train_s
        if (step + 1) % pace.steps == 0:
            served[step + 1] = ended_s + pace.broadcast_s
    return begins


@st.composite
def bounded_paces(draw):
    staleness = draw(st.integers(0, 8))
    pace = RolloutPace(
        1.0, draw(st.floats(0, 6)), 8, draw(st.integers(1, staleness + 1)), draw(st.sampled_from([0.5, 1.0]))
    )
    return pace, staleness


@given(bounded_paces(), st.floats(1, 200))
def test_bubble_within_a_staleness_bound_matches_stepping(bounds, rate):
    pace, staleness = bounds
    begins = stepped(pace, staleness, rate, 120 * pace.steps)
    # 60 periods long after the start: the schedule repeats every few of them.
    seconds = begins[-1] - begins[-1 - 60 * pace.steps]
    assert bubble_ratio_within(pace, staleness, rate) == pytest.approx(1 - 60 * pace.steps / seconds, abs=0.02)


@given(bounded_paces())
def test_least_capacity_within_a_staleness_bound_is_the_threshold(bounds):
    pace, staleness = bounds
    try:
        least = least_rollouts_per_s_within(pace, staleness)
    except UsageError:
        assert bubble_ratio_within(pace, staleness, 1e9) > 0 or pace.broadcast_s == 0
        return
    assert bubble_ratio_within(pace, staleness, least * 1.0001) == pytest.approx(0, abs=1e-6)
    assert bubble_ratio_within(pace, staleness, least * 0.99) > 0


def test_publishing_at_the_bound_leaves_a_bubble_at_any_capacity():
    """κ = S + 1: no batch after the publication may be sampled by an older version."""
    with pytest.raises(UsageError, match="Publish more often"):
        least_rollouts_per_s_within(RolloutPace(100.0, 20.0, 64, 4), 3)
    assert bubble_ratio_within(RolloutPace(100.0, 20.0, 64, 4), 3, 1e9) == pytest.approx(1 - 400 / 420)
    assert bubble_ratio_within(RolloutPace(100.0, 20.0, 64, 2), 3, 1e9) == 0


def test_more_steps_than_the_bound_allows_are_refused():
    with pytest.raises(UsageError, match="with staleness 2, 1 to 3 can be"):
        bubble_ratio_within(RolloutPace(1.0, 0.0, 8, 4), 2, 1.0)
