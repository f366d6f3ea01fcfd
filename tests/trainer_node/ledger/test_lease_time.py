from __future__ import annotations

import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from trainer_node.ledger.lease_time import FACTOR, GUESS_S, LEAST_S, Completions, latest_s


def test_first_leases_last_as_guessed():
    assert Completions().lease_s() == GUESS_S
    assert Completions(guess_s=1.0).lease_s() == LEAST_S


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=63))
def test_without_expiries_the_median_is_exact(seconds):
    completions = Completions()
    for each in seconds:
        completions.completed(each)
    assert completions.median_s() in (statistics.median_low(seconds), statistics.median_high(seconds))
    assert completions.lease_s() == max(LEAST_S, FACTOR * completions.median_s())


def test_expired_leases_lengthen_later_leases_until_jobs_complete():
    """A job that takes longer than its lease is completed after a few attempts."""
    completions, takes_s, attempts = Completions(guess_s=10.0), 400.0, 0
    while completions.lease_s() < takes_s:
        completions.expired(completions.lease_s())
        attempts += 1
        assert attempts < 10
    completions.completed(takes_s)
    assert completions.lease_s() >= takes_s


def test_the_median_of_censored_times_is_near_the_true_one():
    draw = random.Random(3)
    completions, true = Completions(), []
    for _ in range(64):
        takes_s, lease_s = draw.expovariate(1 / 60), draw.uniform(60, 200)
        true.append(takes_s)
        completions.completed(takes_s) if takes_s <= lease_s else completions.expired(lease_s)
    assert 0.6 < completions.median_s() / statistics.median(true) < 1.6


def test_heartbeats_extend_a_lease_to_the_longest_sample_at_the_slowest_rate():
    assert latest_s(8192, 20.0, 60.0) == 8192 / 20
    assert latest_s(100, 20.0, 60.0) == 60.0
    assert latest_s(100, 0.0, 60.0) == 60.0
