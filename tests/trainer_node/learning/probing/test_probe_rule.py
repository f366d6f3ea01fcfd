"""The rule of probes: divergence, floor and alarm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from trainer_node.learning.monitoring.run_record import ALARM_FACTOR
from trainer_node.learning.probing.probe_rule import (
    FLOOR_VERSIONS,
    LEAST_FLOOR,
    MOST_FLOOR,
    ProbeRule,
    divergence,
)

LOGPROBS = st.lists(st.floats(-60.0, 0.0, width=32), min_size=1, max_size=64)
KLS = st.floats(0.0, 1e6)


@given(LOGPROBS, st.data())
def test_divergence_is_zero_for_equal_scores_alone(learner: list[float], data: st.DataObject) -> None:
    engine = data.draw(st.lists(st.floats(-60.0, 0.0, width=32), min_size=len(learner), max_size=len(learner)))
    mine, theirs = np.array(learner, "<f4"), np.array(engine, "<f4")
    found = divergence(mine, theirs)
    assert np.isfinite(found)
    assert found >= 0
    assert divergence(mine, mine) == 0
    if np.abs(mine - theirs).max() > 1e-3:
        assert found > 0


@given(LOGPROBS, st.floats(1e-6, 1e-3))
def test_small_divergence_is_half_the_mean_square(learner: list[float], gap: float) -> None:
    mine = np.array(learner, "<f8")
    assert divergence(mine, mine - gap) == pytest.approx(gap**2 / 2, rel=1e-2, abs=1e-15)


def test_one_impossible_token_keeps_the_divergence_finite() -> None:
    assert np.isfinite(divergence(np.array([0.0, -1.0]), np.array([-1e4, -1.0])))


@given(st.lists(st.lists(KLS, min_size=1, max_size=4), min_size=FLOOR_VERSIONS, max_size=FLOOR_VERSIONS), KLS)
def test_floor_is_the_lower_median_of_the_first_versions(first: list[list[float]], later: float) -> None:
    rule = ProbeRule()
    for step, kls in enumerate(first):
        for kl in kls:
            judged = rule.judge(Version(0, step), kl)
            assert judged.floor is None
            assert judged.alarm == (kl > ALARM_FACTOR * MOST_FLOOR)
    judged = rule.judge(Version(0, FLOOR_VERSIONS), later)
    every = sorted(kl for kls in first for kl in kls)
    floor = min(MOST_FLOOR, max(LEAST_FLOOR, every[(len(every) - 1) // 2]))
    assert judged.floor == floor
    assert judged.alarm == (later > ALARM_FACTOR * floor)


@given(st.lists(KLS, max_size=20), st.floats(LEAST_FLOOR, MOST_FLOOR))
def test_floor_of_an_earlier_start_stays(kls: list[float], floor: float) -> None:
    rule = ProbeRule(floor)
    judged = [rule.judge(Version(1, step), kl) for step, kl in enumerate(kls)]
    assert all(one.floor == floor for one in judged)
    assert [one.alarm for one in judged] == [kl > ALARM_FACTOR * floor for kl in kls]


@given(st.lists(KLS, min_size=FLOOR_VERSIONS + 1, max_size=30))
def test_floor_does_not_follow_the_run(kls: list[float]) -> None:
    rule = ProbeRule()
    floors = [rule.judge(Version(0, step), kl).floor for step, kl in enumerate(kls)]
    assert floors[:FLOOR_VERSIONS] == [None] * FLOOR_VERSIONS
    assert len(set(floors[FLOOR_VERSIONS:])) == 1


def test_one_wrong_engine_of_two_does_not_raise_the_floor() -> None:
    rule = ProbeRule()
    for step in range(FLOOR_VERSIONS):
        rule.judge(Version(0, step), 1e-6)
        rule.judge(Version(0, step), 0.3)
    assert rule.judge(Version(0, FLOOR_VERSIONS), 1e-6) == (1e-6, 1e-6, False)
    assert rule.judge(Version(0, FLOOR_VERSIONS), 0.3).alarm


def test_engine_that_is_wrong_from_the_start_raises_the_alarm_at_once() -> None:
    assert ProbeRule().judge(Version(0, 0), 3.0).alarm
