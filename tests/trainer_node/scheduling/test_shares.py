"""Algorithm 1: shares, estimates, exclusion and ceilings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_node.scheduling.shares import MOST_MEDIANS, PROBE_S, Load, Throughputs, jobs_for, split

NAMES = st.text("abcdef", min_size=1, max_size=3)
RATES = st.dictionaries(NAMES, st.floats(0, 1e6), min_size=1, max_size=8)


def test_the_example_of_the_paper():
    assert split(300, {"h100": 5000.0, "a100": 2500.0}) == {"h100": 200, "a100": 100}


@given(st.integers(0, 5000), RATES)
def test_shares_sum_to_the_batch_within_a_job_of_exact_shares(jobs, rates):
    shares = split(jobs, rates)
    assert sum(shares.values()) == jobs
    total = sum(rates.values())
    for worker, share in shares.items():
        exact = jobs * rates[worker] / total if total else jobs / len(rates)
        assert abs(share - exact) < 1 + 1e-6


def test_no_throughput_at_all_gives_equal_shares():
    assert split(7, {"a": 0.0, "b": 0.0, "c": 0.0}) == {"a": 3, "b": 2, "c": 2}
    assert split(7, {}) == {}


def settled(throughputs: Throughputs, worker: str, tokens: int, seconds: float) -> None:
    throughputs.join(worker)
    throughputs.accepted(worker, tokens)
    throughputs.busy(worker, seconds)
    throughputs.settle(worker)


def test_estimates_are_smoothed_and_windows_without_leases_say_nothing():
    throughputs = Throughputs()
    settled(throughputs, "a", 1000, 1.0)
    assert throughputs.estimate("a") == 1000
    settled(throughputs, "a", 500, 1.0)
    assert throughputs.estimate("a") == pytest.approx(0.7 * 1000 + 0.3 * 500)
    throughputs.settle("a")
    assert throughputs.estimate("a") == pytest.approx(850)


def test_a_worker_without_accepted_results_loses_its_share():
    throughputs = Throughputs()
    settled(throughputs, "honest", 1000, 1.0)
    settled(throughputs, "silent", 1000, 1.0)
    for _ in range(20):
        settled(throughputs, "honest", 1000, 1.0)
        settled(throughputs, "silent", 0, 1.0)
    assert throughputs.estimate("silent") == pytest.approx(0.8, abs=0.1)
    least = MOST_MEDIANS / (MOST_MEDIANS + 1)
    assert split(100, throughputs.of(["honest", "silent"]))["honest"] >= 100 * least - 1


def test_estimate_counts_up_to_some_medians_of_the_others():
    throughputs = Throughputs()
    for worker, rate in (("a", 100), ("b", 300), ("c", 500), ("liar", 10**6)):
        settled(throughputs, worker, rate, 1.0)
    assert throughputs.of(["a", "b", "c", "liar"]) == {"a": 100, "b": 300, "c": 500, "liar": 300 * MOST_MEDIANS}
    assert throughputs.of(["a", "liar"]) == {"a": 100, "liar": 100 * MOST_MEDIANS}
    assert throughputs.of(["liar"]) == {"liar": 10**6}
    settled(throughputs, "idle", 0, 1.0)
    assert throughputs.of(["idle", "c"]) == {"idle": 0, "c": 500}, "a median of 0 bounds nothing"


def test_window_of_an_instant_goes_on():
    throughputs = Throughputs()
    settled(throughputs, "a", 2000, 0.001)
    assert throughputs.estimate("a") is None
    settled(throughputs, "a", 0, 0.999)
    assert throughputs.estimate("a") == pytest.approx(2000)


def test_exclusion_decays_once_a_publication_and_only_excluded_workers():
    throughputs = Throughputs()
    for worker in "ab":
        settled(throughputs, worker, 1000, 1.0)
    throughputs.published(["a"])
    throughputs.published(["a"])
    assert throughputs.estimate("a") == 1000
    assert throughputs.estimate("b") == pytest.approx(810)
    assert throughputs.of(["a"]) == {"a": 1000}


def test_a_new_worker_counts_as_the_median():
    throughputs = Throughputs()
    for worker, rate in (("a", 100), ("b", 300), ("c", 500)):
        settled(throughputs, worker, rate, 1.0)
    throughputs.join("new")
    assert throughputs.of(["a", "b", "c", "new"])["new"] == 300
    only = Throughputs()
    only.join("x")
    assert split(4, only.of(["x"])) == {"x": 4}


def test_an_excluded_worker_is_probed_now_and_then():
    throughputs = Throughputs()
    throughputs.join("a")
    assert throughputs.may_probe("a", 0.0)
    throughputs.probed("a", 0.0)
    assert not throughputs.may_probe("a", PROBE_S - 0.1)
    assert throughputs.may_probe("a", PROBE_S)


def test_a_ceiling_binds_only_while_another_worker_could_take_the_jobs():
    shares = {"a": 4, "b": 4}
    assert jobs_for("a", 2, shares, {"a": Load(0, 2), "b": Load(0, 0)}) == 2
    assert jobs_for("a", 2, shares, {"a": Load(3, 2), "b": Load(0, 1)}) == 1
    assert jobs_for("a", 2, shares, {"a": Load(4, 2), "b": Load(0, 1)}) == 0
    assert jobs_for("a", 2, shares, {"a": Load(4, 2), "b": Load(0, 0)}) == 2, "b has no free slot"
    assert jobs_for("a", 2, shares, {"a": Load(4, 2), "b": Load(4, 3)}) == 2, "b has had its share"


@given(RATES, st.integers(1, 60), st.randoms())
def test_every_job_of_a_batch_is_leased_in_any_order_of_requests(rates, jobs, draw):
    """Workers that never stop asking lease all jobs of a batch, and no share is exceeded while others have slots."""
    shares = split(jobs, rates)
    leases, left = dict.fromkeys(rates, 0), jobs
    while left:
        worker = draw.choice(sorted(rates))
        loads = {w: Load(leases[w], 1) for w in rates}
        got = min(left, jobs_for(worker, 1, shares, loads))
        leases[worker] += got
        left -= got
    assert leases == shares
