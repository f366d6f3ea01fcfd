"""Which windows of sending measure the uplink."""

from __future__ import annotations

from topology.hub_uplink import KEPT, WINDOW_S, Uplink


def test_one_head_alone_says_nothing_about_the_uplink() -> None:
    uplink = Uplink()
    for second in range(4):
        assert not uplink.sample(float(second), {"a": second * 1000}, {"a"})
    assert uplink.bps is None


def test_all_that_was_sent_counts_while_two_were_pulling() -> None:
    uplink = Uplink()
    both = {"a", "b"}
    assert not uplink.sample(0.0, {"a": 0, "b": 0, "c": 0}, both)
    assert uplink.sample(1.0, {"a": 1000, "b": 500, "c": 250}, both)
    assert uplink.bps == 14_000
    assert not uplink.sample(2.0, {"a": 9000, "b": 9000}, {"a"})  # one was done before its end
    assert not uplink.sample(3.0, {"a": 19_000, "b": 9000}, both)  # b had not begun
    assert uplink.sample(4.0, {"a": 19_100, "b": 9100}, both)
    assert (uplink.bps, uplink.windows) == (14_000, 2)


def test_windows_have_a_least_length_and_links_may_change() -> None:
    uplink = Uplink()
    both = {"a", "b"}
    uplink.sample(0.0, {"a": 0, "b": 0}, both)
    assert not uplink.sample(WINDOW_S / 2, {"a": 10**9, "b": 10**9}, both)
    assert uplink.sample(1.0, {"a": 1000, "b": 0, "new": 10**9}, both)
    assert uplink.bps == 8_000
    assert uplink.sample(2.0, {"a": 2000, "b": 0, "new": 0}, both)  # dialled again: its count began anew
    assert uplink.bps == 8_000


def test_an_uplink_that_shrank_is_found_out_in_the_end() -> None:
    uplink = Uplink()
    sent = 0
    for number in range(KEPT + 2):
        sent += 1000 if number < 2 else 100
        uplink.sample(float(number), {"a": sent, "b": 0}, {"a", "b"})
    assert uplink.bps == 800
