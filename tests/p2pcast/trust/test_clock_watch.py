"""Whether a wall clock may be used to forget records by age."""

from __future__ import annotations

import pytest

from p2pcast.trust.clock_watch import AWAY_S, JUMP_S, SETTLE_S, ClockWatch, Jump

NOW, DAY_S = 1_800_000_000.0, 86_400.0


@pytest.mark.parametrize("far_s", [400 * DAY_S, -400 * DAY_S])
def test_a_clock_that_comes_back_is_trusted_at_once(far_s):
    watch = ClockWatch(NOW, 5.0, None)
    assert watch.observe(NOW + 10, 15.0) is None
    assert watch.observe(NOW + far_s + 20, 25.0) == Jump(NOW + 20, NOW + far_s + 20)
    assert not watch.settled
    assert watch.observe(NOW + far_s + 80, 85.0) is None
    assert not watch.settled
    assert watch.observe(NOW + 90, 95.0) == Jump(NOW + far_s + 90, NOW + 90)
    assert watch.settled


def test_a_clock_that_stays_is_trusted_after_a_day():
    watch, far_s = ClockWatch(NOW, 0.0, NOW), 3600.0
    watch.observe(NOW + far_s, 0.0)
    watch.observe(NOW + far_s + SETTLE_S - 1, SETTLE_S - 1)
    assert not watch.settled
    watch.observe(NOW + far_s + SETTLE_S, SETTLE_S)
    assert watch.settled


def test_a_clock_that_is_slewed_is_trusted():
    watch, wall_s = ClockWatch(NOW, 0.0, NOW), NOW
    for second in range(1, 10_000):
        wall_s += 1.05
        assert watch.observe(wall_s, float(second)) is None
        assert watch.settled


@pytest.mark.parametrize(
    ("known_s", "settled"),
    [(None, True), (NOW - AWAY_S, True), (NOW + JUMP_S, True), (NOW - 400 * DAY_S, False), (NOW + DAY_S, False)],
)
def test_a_process_that_starts_far_from_its_records_doubts_its_clock(known_s, settled):
    watch = ClockWatch(NOW, 0.0, known_s)
    assert watch.settled == settled
    watch.observe(NOW + SETTLE_S, SETTLE_S)
    assert watch.settled
