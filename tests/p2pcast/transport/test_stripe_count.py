"""The number of stripes: few on short paths, more on long ones and for congestion control that slows down at loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.transport.stripe_count import FEWEST, MOST, NetworkPath, lossy_window, stripes

ROOMY = 64e6


def chosen(
    rtt_s: float, congestion: str = "bbr", rate_bps: float = 100e6, window_bytes: float = ROOMY, loss: float = 0.001
) -> int:
    return stripes(NetworkPath(rtt_s, rate_bps, congestion, window_bytes, loss))


def test_there_are_at_least_the_fewest_stripes() -> None:
    assert chosen(0.0002) == chosen(0.0) == chosen(0.006) == chosen(0.0002, "cubic") == FEWEST


def test_a_longer_path_takes_more_stripes() -> None:
    numbers = [chosen(rtt_s) for rtt_s in (0.01, 0.03, 0.1, 0.3)]
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1] == MOST


def test_bbr_needs_fewer_than_cubic() -> None:
    assert chosen(0.05) < chosen(0.05, "cubic")
    assert chosen(0.05, "cubic", loss=0.0) == chosen(0.05)


def test_small_buffers_take_more_stripes() -> None:
    assert chosen(0.05, window_bytes=100_000) > chosen(0.05)


def test_a_slow_transfer_does_not_reduce_the_stripes() -> None:
    assert chosen(0.05, "cubic", rate_bps=1e6) == chosen(0.05, "cubic")


def test_lossy_windows_match_the_rfc() -> None:
    # RFC 9438, table 1: RTT 0.1 s, loss 1e-4: CUBIC 187 packets, Reno 120 (by 1.2/sqrt(p)).
    assert lossy_window("cubic", 0.1, 1e-4) == pytest.approx(187, rel=0.02)
    assert lossy_window("reno", 0.1, 1e-4) == pytest.approx(120, rel=0.03)
    assert lossy_window("reno", 0.1, 0.0) == float("inf")


ways = st.builds(
    NetworkPath,
    st.floats(0, 10),
    st.floats(0, 1e12),
    st.sampled_from(["bbr", "cubic", "reno", ""]),
    st.floats(4096, 1e9),
    st.floats(0, 1),
)


@given(ways, st.floats(1, 10))
def test_always_a_power_of_two_in_range_and_never_fewer_for_a_longer_way(way: NetworkPath, times: float) -> None:
    number = stripes(way)
    assert number in (1, 2, 4, 8, 16)
    if way.congestion not in ("cubic",):
        assert (
            stripes(NetworkPath(way.rtt_s * times, way.rate_bps, way.congestion, way.window_bytes, way.loss)) >= number
        )
