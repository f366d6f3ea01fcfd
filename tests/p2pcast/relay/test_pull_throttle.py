"""The rate left for pulling while a version is on its way: small, and never zero."""

from __future__ import annotations

import pytest

from p2pcast.relay.pull_throttle import Throughput, pull_bytes_s
from p2pcast.relay.tuning import (
    PULL_FLOOR_BYTES_S,
    PULL_LEAST_BYTES_S,
    PULL_SHARE,
    RATE_WINDOW_S,
    THROUGHPUT_WINDOWS,
)


@pytest.mark.parametrize("peak", [0.0, 1e4, 1e6, 12.5e6, 1e9])
@pytest.mark.parametrize("links", [0, 1, 3, 64])
def test_pulling_gets_a_small_share_and_never_zero(peak, links):
    each = pull_bytes_s(peak, links)
    assert each >= PULL_LEAST_BYTES_S
    assert each * max(1, links) <= max(PULL_SHARE * peak, PULL_FLOOR_BYTES_S, PULL_LEAST_BYTES_S * links) + links


def test_the_peak_is_the_fastest_window():
    seen = Throughput()
    counts = {"a": 0, "b": 0}
    for step in range(4):
        counts["a"] += 1000 * step
        counts["b"] += 500
        seen.sample(step * RATE_WINDOW_S, counts)
    assert seen.peak_bytes_s == pytest.approx(3500 / RATE_WINDOW_S)


def test_extra_samples_and_changing_links_do_not_raise_the_peak():
    seen = Throughput()
    seen.sample(0.0, {"a": 0})
    seen.sample(RATE_WINDOW_S / 2, {"a": 10_000})
    assert seen.peak_bytes_s == 0
    seen.sample(RATE_WINDOW_S, {"a": 10_000, "b": 1 << 40})
    assert seen.peak_bytes_s == pytest.approx(10_000 / RATE_WINDOW_S), (
        "what another link carried before we looked is not this window's"
    )
    seen.sample(2 * RATE_WINDOW_S, {})
    assert seen.peak_bytes_s == pytest.approx(10_000 / RATE_WINDOW_S)


def test_an_old_peak_is_forgotten():
    seen = Throughput()
    count = 0
    for window in range(THROUGHPUT_WINDOWS + 3):
        count += 1_000_000 if window == 1 else 1000
        seen.sample(window * RATE_WINDOW_S, {0: count})
    assert seen.peak_bytes_s == pytest.approx(1000 / RATE_WINDOW_S)
