"""How little is left for pulling while a version is on its way, and that it is never nothing."""

from __future__ import annotations

import pytest

from p2pcast.relay.yielding import FLOOR_BYTES_S, KEPT, LEAST_BYTES_S, SHARE, WINDOW_S, Throughput, trickle_bytes_s


@pytest.mark.parametrize("peak", [0.0, 1e4, 1e6, 12.5e6, 1e9])
@pytest.mark.parametrize("links", [0, 1, 3, 64])
def test_a_small_share_and_never_nothing(peak, links):
    each = trickle_bytes_s(peak, links)
    assert each >= LEAST_BYTES_S
    assert each * max(1, links) <= max(SHARE * peak, FLOOR_BYTES_S, LEAST_BYTES_S * links) + links


def test_the_peak_is_the_fastest_window():
    seen = Throughput()
    counts = {"a": 0, "b": 0}
    for step in range(4):
        counts["a"] += 1000 * step
        counts["b"] += 500
        seen.look(step * WINDOW_S, counts)
    assert seen.peak_bytes_s == pytest.approx(3500 / WINDOW_S)


def test_looking_more_often_changes_nothing_and_links_come_and_go():
    seen = Throughput()
    seen.look(0.0, {"a": 0})
    seen.look(WINDOW_S / 2, {"a": 10_000})
    assert seen.peak_bytes_s == 0
    seen.look(WINDOW_S, {"a": 10_000, "b": 1 << 40})
    assert seen.peak_bytes_s == pytest.approx(10_000 / WINDOW_S), (
        "what another link carried before we looked is not this window's"
    )
    seen.look(2 * WINDOW_S, {})
    assert seen.peak_bytes_s == pytest.approx(10_000 / WINDOW_S)


def test_an_old_peak_is_forgotten():
    seen = Throughput()
    count = 0
    for window in range(KEPT + 3):
        count += 1_000_000 if window == 1 else 1000
        seen.look(window * WINDOW_S, {0: count})
    assert seen.peak_bytes_s == pytest.approx(1000 / WINDOW_S)
