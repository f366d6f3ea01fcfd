"""The score against numbers computed by hand from ECHO-2, appendix C.3."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.score import DEFAULT_CAP_BPS, HIGHEST_CAP_BPS, Transfers, reliability, score, speed_cap_bps


def after(*results: tuple[float, int, float, bool]) -> Transfers:
    transfers = Transfers()
    for now_s, transferred_bytes, seconds, ok in results:
        transfers = transfers.record(now_s, transferred_bytes, seconds, ok)
    return transfers


def test_a_peer_never_measured_has_no_score() -> None:
    assert score(Transfers(), 100.0) is None
    assert Transfers().bps is None


def test_four_good_transfers_and_one_bad() -> None:
    # 1e7 bit/s: Speed = 100 * (7 - 3) / 5 = 80; Success = 4/5; Stability = 4/10; idle 60 s: Decay = 0.9.
    transfers = after(*[(float(t), 1_250_000, 1.0, True) for t in range(4)], (4.0, 0, 1.0, False))
    result = score(transfers, 64.0)
    assert result is not None
    assert result.speed == pytest.approx(80.0)
    assert result.success == pytest.approx(80.0)
    assert result.stability == pytest.approx(40.0)
    assert result.decay == pytest.approx(0.9)
    assert result.total == pytest.approx(0.9 * (40.0 + 28.0 + 6.0))  # 66.6
    assert transfers.bps == pytest.approx(1e7)


@pytest.mark.parametrize(
    ("bits_per_s", "speed"),
    [(80, 0.0), (1_000, 0.0), (100_000, 40.0), (12_500_000, 81.93820026), (100_000_000, 100.0), (10**10, 100.0)],
)
def test_speed_runs_from_a_kilobit_to_a_hundred_megabits(bits_per_s: int, speed: float) -> None:
    result = score(after((0.0, bits_per_s, 8.0, True)), 0.0)
    assert result is not None
    assert result.speed == pytest.approx(speed)


def test_another_cap_tells_faster_peers_apart() -> None:
    speeds = [
        result.speed
        for bps in (1e3, 1e7, 1e8, 1e9, 1e10)
        if (result := score(after((0.0, int(bps), 8.0, True)), 0.0, 1e9))
    ]
    assert speeds == pytest.approx([0.0, 100 * 4 / 6, 100 * 5 / 6, 100.0, 100.0])


def test_the_cap_is_as_stated_else_the_fastest_peers_rate() -> None:
    assert speed_cap_bps([None, 1e6, 5e9]) == 5e9
    assert speed_cap_bps([1e6, None]) == speed_cap_bps([]) == DEFAULT_CAP_BPS, "the paper's, where no peer is faster"
    assert speed_cap_bps([1e6, 5e9], 3e7) == 3e7
    assert speed_cap_bps([1e30]) == HIGHEST_CAP_BPS, "a false claim must not make all others slow"


@settings(deadline=None)
@given(st.lists(st.floats(1, 1e12), min_size=2, max_size=9))
def test_a_faster_peer_never_scores_lower(rates: list[float]) -> None:
    cap = speed_cap_bps(rates)
    found = [
        (bps, result.speed)
        for bps in sorted(rates)
        if (result := score(after((0.0, 1 << 40, 8.0 * (1 << 40) / bps, True)), 0.0, cap))
    ]
    for (slow, low), (fast, high) in pairwise(found):
        assert low <= high + 1e-9
        assert low < high or fast < 1.01 * slow or fast <= 1e3 * 1.01


def test_old_failures_fade() -> None:
    transfers = Transfers(good=0, bad=200)
    for _ in range(1000):
        transfers = transfers.record(0.0, 0, 0.0, True)
        assert transfers.good + transfers.bad <= 256
    assert transfers.bad / transfers.good < 0.02


def test_reliability_is_the_score_without_speed_and_a_short_record_is_no_fault() -> None:
    assert reliability(Transfers()) is None
    assert reliability(after((0.0, 0, 0.0, True))) == pytest.approx(100.0)
    assert reliability(Transfers(good=9, bad=1)) == pytest.approx(93.0)
    assert reliability(Transfers(good=9, bad=4, failures_in_row=4)) == pytest.approx(70 * 9 / 13)


def test_stability_falls_to_zero_at_the_fourth_failure_in_a_row_and_comes_back_with_a_success() -> None:
    transfers = after(*[(0.0, 1_000_000, 1.0, True)] * 10)
    for failures in range(1, 5):
        transfers = transfers.record(0.0, 0, 0.0, False)
        result = score(transfers, 0.0)
        assert result is not None
        assert result.stability == (100.0 if failures <= 3 else 0.0)
    result = score(transfers.record(0.0, 1_000_000, 1.0, True), 0.0)
    assert result is not None
    assert result.stability == 100.0


def test_decay_stops_at_three_tenths_and_a_clock_that_steps_back_is_no_bonus() -> None:
    transfers = after((1000.0, 100_000_000, 1.0, True))
    decays = [result.decay for now in (900.0, 1000.0, 1180.0, 1e9) if (result := score(transfers, now))]
    assert decays == pytest.approx([1.0, 1.0, 0.7, 0.7])


def test_a_peer_that_only_fails_scores_nothing() -> None:
    result = score(after((0.0, 0, 1.0, False)), 0.0)
    assert result is not None
    assert result.total == 0.0


def test_average_rate_moves_by_weight_and_ignores_empty_measurements() -> None:
    transfers = after((0.0, 1_000, 1.0, True), (1.0, 2_000, 1.0, True))
    assert transfers.bytes_per_s == pytest.approx(1_300.0)
    for transferred, seconds, ok in ((0, 1.0, True), (5_000, 0.0, True), (9_000, 1.0, False)):
        assert transfers.record(2.0, transferred, seconds, ok).bytes_per_s == transfers.bytes_per_s


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 40), st.floats(0, 1e4), st.booleans()), max_size=30),
    st.floats(0, 2e6),
    st.floats(2e3, 1e12),
)
def test_scores_stay_in_range(results: list[tuple[float, int, float, bool]], now_s: float, cap_bps: float) -> None:
    result = score(after(*results), now_s, cap_bps)
    assert (result is None) == (not results)
    if result is not None:
        assert 0.7 - 1e-9 <= result.decay <= 1.0
        assert all(0.0 <= part <= 100.0 for part in (result.total, result.speed, result.success, result.stability))
