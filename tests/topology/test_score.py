"""The score against numbers worked out by hand from ECHO-2, appendix C.3."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.score import Transfers, score


def after(*results: tuple[float, int, float, bool]) -> Transfers:
    transfers = Transfers()
    for now_s, transferred_bytes, seconds, ok in results:
        transfers = transfers.record(now_s, transferred_bytes, seconds, ok)
    return transfers


def test_a_peer_never_measured_has_no_score() -> None:
    assert score(Transfers(), 100.0) is None
    assert Transfers().bps is None


def test_four_good_transfers_and_one_bad() -> None:
    # 1e7 B/s: Speed = 100 * (7 - 3) / 5 = 80; Success = 4/5; Stability = 4/10; idle 60 s: Decay = 0.9.
    transfers = after(*[(float(t), 10_000_000, 1.0, True) for t in range(4)], (4.0, 0, 1.0, False))
    result = score(transfers, 64.0)
    assert result is not None
    assert result.speed == pytest.approx(80.0)
    assert result.success == pytest.approx(80.0)
    assert result.stability == pytest.approx(40.0)
    assert result.decay == pytest.approx(0.9)
    assert result.total == pytest.approx(0.9 * (40.0 + 28.0 + 6.0))  # 66.6
    assert transfers.bps == pytest.approx(8e7)


@pytest.mark.parametrize(
    ("bytes_per_s", "speed"),
    [(10, 0.0), (1_000, 0.0), (100_000, 40.0), (12_500_000, 81.93820026), (100_000_000, 100.0), (10**10, 100.0)],
)
def test_speed_runs_from_a_kilobyte_to_a_hundred_megabytes(bytes_per_s: int, speed: float) -> None:
    result = score(after((0.0, bytes_per_s, 1.0, True)), 0.0)
    assert result is not None
    assert result.speed == pytest.approx(speed)


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


def test_average_rate_moves_by_its_weight_and_ignores_what_measures_nothing() -> None:
    transfers = after((0.0, 1_000, 1.0, True), (1.0, 2_000, 1.0, True))
    assert transfers.bytes_per_s == pytest.approx(1_300.0)
    for transferred, seconds, ok in ((0, 1.0, True), (5_000, 0.0, True), (9_000, 1.0, False)):
        assert transfers.record(2.0, transferred, seconds, ok).bytes_per_s == transfers.bytes_per_s


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 40), st.floats(0, 1e4), st.booleans()), max_size=30),
    st.floats(0, 2e6),
)
def test_scores_stay_in_range(results: list[tuple[float, int, float, bool]], now_s: float) -> None:
    result = score(after(*results), now_s)
    assert (result is None) == (not results)
    if result is not None:
        assert 0.7 - 1e-9 <= result.decay <= 1.0
        assert all(0.0 <= part <= 100.0 for part in (result.total, result.speed, result.success, result.stability))
