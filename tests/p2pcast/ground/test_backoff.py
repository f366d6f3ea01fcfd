from __future__ import annotations

import math
import random

import pytest

from p2pcast.ground.backoff import Backoff


def middle(low: float, high: float) -> float:
    return (low + high) / 2


def test_delays_double_up_to_the_cap():
    backoff = Backoff(0.5, 3.0, middle)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_growth_factor_is_configurable():
    backoff = Backoff(1.0, 10.0, middle, factor=1.5)
    assert [backoff.next_s() for _ in range(3)] == [1.0, 1.5, 2.25]


def test_reset_returns_to_the_first_delay():
    backoff = Backoff(0.5, 3.0, middle)
    for _ in range(4):
        backoff.next_s()
    assert backoff.attempts == 4
    backoff.reset()
    assert (backoff.attempts, backoff.next_s()) == (0, 0.5)


def test_jitter_bounds_are_fractions_of_the_delay():
    asked = []

    def upper(low: float, high: float) -> float:
        asked.append((low, high))
        return high

    backoff = Backoff(2.0, 8.0, upper, jitter=0.25)
    assert [backoff.next_s(), backoff.next_s()] == [2.5, 5.0]
    assert asked == [(0.75, 1.25)] * 2


def test_jitter_does_not_accumulate():
    backoff = Backoff(1.0, 4.0, random.Random(7).uniform)
    for expected in [1.0, 2.0, 4.0, 4.0, 4.0]:
        assert expected * 0.5 <= backoff.next_s() <= expected * 1.5


def test_no_randomness_means_no_jitter():
    backoff = Backoff(0.25, math.inf, None)
    assert [backoff.next_s() for _ in range(4)] == [0.25, 0.5, 1.0, 2.0]


def test_a_cap_for_one_delay_lowers_later_delays():
    backoff = Backoff(0.1, 3.0, middle)
    for _ in range(5):
        backoff.next_s()
    assert [backoff.next_s(at_most_s=0.5), backoff.next_s(), backoff.next_s()] == [0.5, 1.0, 2.0]


def test_a_cap_for_one_delay_above_the_delay_changes_nothing():
    backoff = Backoff(0.1, 3.0, middle)
    assert [backoff.next_s(at_most_s=0.5), backoff.next_s()] == [0.1, 0.2]


def test_many_retries_do_not_overflow():
    backoff = Backoff(0.5, 30.0, middle)
    assert [backoff.next_s() for _ in range(5000)][-1] == 30.0


@pytest.mark.parametrize(
    ("base_s", "cap_s", "factor", "jitter"),
    [(0.0, 1.0, 2.0, 0.5), (2.0, 1.0, 2.0, 0.5), (1.0, 2.0, 0.5, 0.5), (1.0, 2.0, 2.0, 1.0), (1.0, 2.0, 2.0, -0.1)],
)
def test_impossible_settings_are_rejected(base_s: float, cap_s: float, factor: float, jitter: float):
    with pytest.raises(ValueError, match="no backoff"):
        Backoff(base_s, cap_s, middle, factor=factor, jitter=jitter)
