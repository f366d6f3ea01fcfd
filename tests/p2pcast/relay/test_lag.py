"""What a child tells of its pace, and when."""

from __future__ import annotations

import itertools

import pytest

from p2pcast.relay.lag import CATCH_UP_S, WINDOW_S, Lag
from topology.laggards import STRAGGLES

EVERY_S = 0.05


def watch(lag: Lag, rates: list[tuple[float, float]], began_s: float = 0.0) -> list[float]:
    """Look every 50 ms at a child that gets so much a second, at most, while its parent gets so much: when the hub is told."""
    told, got, there = [], 0.0, 0.0
    lag.begin(began_s, 0)
    for look, (in_bps, above_bps) in enumerate(rates, 1):
        there += above_bps * EVERY_S / 8
        got = min(there, got + in_bps * EVERY_S / 8)
        if lag.look(began_s + look * EVERY_S, int(got), int(there - got)):
            told.append(began_s + look * EVERY_S)
    return told


def test_one_that_keeps_up_says_nothing_and_knows_its_inflow():
    lag = Lag()
    assert watch(lag, [(100e6, 80e6)] * 100) == []
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(80e6, rel=0.01)
    assert not lag.lags


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6])
def test_one_that_falls_behind_says_so_soon_and_once_a_window(share):
    lag = Lag()
    told = watch(lag, [(100e6, 100e6)] * 40 + [(share * 100e6, 100e6)] * 40)
    # Behind by (1 - share) of a second each second, at a pace of which a window has to be full.
    assert 2.0 < told[0] <= 2.0 + WINDOW_S + CATCH_UP_S * share / (1 - share) + 2 * EVERY_S
    assert all(b - a >= WINDOW_S - 1e-9 for a, b in itertools.pairwise(told))
    assert lag.lags
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(share * 100e6, rel=0.01)


@pytest.mark.parametrize(("rtt_s", "slow"), [(0.0, True), (0.3, False)], ids=["near", "far"])
def test_a_loss_on_a_long_way_makes_nobody_slow(rtt_s, slow):
    """What is behind it is held up for a round trip of 0.3 s, and then it is all there."""
    lag, bps, seen = Lag(), 10e6, []
    lag.begin(0.0, 0)
    for look in range(1, 101):
        now = look * EVERY_S
        came_s = 3.0 if 3.0 <= now < 3.3 else now
        lag.look(now, int(came_s * bps / 8), int((now - came_s) * bps / 8), rtt_s)
        if lag.inflow is not None:
            seen.append(lag.inflow.bps)
    assert (min(seen) * STRAGGLES < bps) is slow
    assert not lag.lags


def test_a_rate_is_of_a_whole_window():
    lag = Lag()
    lag.begin(0.0, 1000)
    assert not lag.look(WINDOW_S - 0.01, 1000, 10**9)
    assert lag.inflow is None
    assert lag.look(WINDOW_S, 1000, 10**9), "nothing came, and much was there"
    lag.begin(1.0, 1000)
    assert lag.inflow is None


def test_a_look_that_comes_late_makes_the_window_longer_not_the_pace_less():
    lag = Lag()
    lag.begin(0.0, 0)
    lag.look(0.05, 500, 0)
    lag.look(2.0, 20_000, 0)
    assert lag.inflow is not None
    assert lag.inflow.bps == pytest.approx(8 * 10_000)
