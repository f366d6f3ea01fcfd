"""The inflow that a child reports, and when."""

from __future__ import annotations

import itertools

import pytest

from p2pcast.relay.child_lag import ChildLag
from p2pcast.relay.tuning import CATCH_UP_S, RATE_WINDOW_S
from topology.slow_peers import STRAGGLES

EVERY_S = 0.05


def watch(lag: ChildLag, rates: list[tuple[float, float]], began_s: float = 0.0) -> list[float]:
    """Sample a child every 50 ms. ``rates``: for each sample, the most that the child receives and the rate at which
    its parent receives. Returns the times of reports.
    """
    told, got, there = [], 0.0, 0.0
    lag.begin(began_s, 0)
    for look, (in_bps, above_bps) in enumerate(rates, 1):
        there += above_bps * EVERY_S / 8
        got = min(there, got + in_bps * EVERY_S / 8)
        if lag.sample(began_s + look * EVERY_S, int(got), int(there - got)):
            told.append(began_s + look * EVERY_S)
    return told


def test_a_child_that_keeps_up_reports_nothing_and_knows_its_inflow():
    lag = ChildLag()
    assert watch(lag, [(100e6, 80e6)] * 100) == []
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(80e6, rel=0.01)
    assert not lag.lags


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6])
def test_a_child_that_falls_behind_reports_soon_and_once_a_window(share):
    lag = ChildLag()
    told = watch(lag, [(100e6, 100e6)] * 40 + [(share * 100e6, 100e6)] * 40)
    # Each second the child falls behind by (1 - share) seconds; a whole window has to show that rate.
    assert 2.0 < told[0] <= 2.0 + RATE_WINDOW_S + CATCH_UP_S * share / (1 - share) + 2 * EVERY_S
    assert all(b - a >= RATE_WINDOW_S - 1e-9 for a, b in itertools.pairwise(told))
    assert lag.lags
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(share * 100e6, rel=0.01)


@pytest.mark.parametrize(("rtt_s", "slow"), [(0.0, True), (0.3, False)], ids=["near", "far"])
def test_one_loss_on_a_long_path_does_not_make_a_child_slow(rtt_s, slow):
    """All data behind the lost packet waits for a round trip of 0.3 s, and then arrives at once."""
    lag, bps, seen = ChildLag(), 10e6, []
    lag.begin(0.0, 0)
    for look in range(1, 101):
        now = look * EVERY_S
        came_s = 3.0 if 3.0 <= now < 3.3 else now
        lag.sample(now, int(came_s * bps / 8), int((now - came_s) * bps / 8), rtt_s)
        if lag.inflow is not None:
            seen.append(lag.inflow.bps)
    assert (min(seen) * STRAGGLES < bps) is slow
    assert not lag.lags


def test_a_rate_covers_a_whole_window():
    lag = ChildLag()
    lag.begin(0.0, 1000)
    assert not lag.sample(RATE_WINDOW_S - 0.01, 1000, 10**9)
    assert lag.inflow is None
    assert lag.sample(RATE_WINDOW_S, 1000, 10**9), "nothing came, and the parent had much"
    lag.begin(1.0, 1000)
    assert lag.inflow is None


def test_a_late_sample_lengthens_the_window_and_keeps_the_rate():
    lag = ChildLag()
    lag.begin(0.0, 0)
    lag.sample(0.05, 500, 0)
    lag.sample(2.0, 20_000, 0)
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(8 * 10_000)
