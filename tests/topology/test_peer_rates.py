"""Slowness is charged to the peer where it begins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.broadcast_time import DEFAULT_PEER_BPS
from topology.peer_rates import PROBE, PROBE_DEPTH, PeerRate, assumed_bps, slowest_bps, update_rates
from topology.plan_tree import ROOT, Plan

MBIT = 1e6
SIZE = 1e7
CHAIN = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b", "d": "c"})


def samples(**mbit: float) -> dict[str, tuple[float, float]]:
    return {peer: (SIZE, rate * MBIT) for peer, rate in mbit.items()}


def test_only_the_slow_peer_is_charged() -> None:
    updated = update_rates(CHAIN, CHAIN, {}, samples(a=100, b=20, c=20, d=19), 100 * MBIT)
    assert updated == {"a": PeerRate(1e8), "b": PeerRate(2e7, True), "c": PeerRate(2e7), "d": PeerRate(1.9e7)}


def test_the_slowest_peer_is_known_once_all_are() -> None:
    fast, slow, unknown = PeerRate(1e9), PeerRate(2e7, True), PeerRate()
    assert slowest_bps([fast, slow]) == 2e7
    assert slowest_bps([fast, unknown, slow]) is None
    assert slowest_bps([fast, PeerRate(0.0)]) == 0
    assert slowest_bps([]) is None


def test_a_head_is_charged_only_if_the_uplink_had_more() -> None:
    heads = Plan((1, 1), dict.fromkeys("abcd", ROOT))
    updated = update_rates(heads, heads, {}, samples(a=50, b=50, c=50, d=30), 200 * MBIT)
    assert [updated[p].exact for p in "abcd"] == [False, False, False, True]


def test_a_peer_with_two_children_offers_each_half() -> None:
    fork = Plan((1, 1), {"a": ROOT, "b": "a", "c": "a"})
    updated = update_rates(fork, fork, {}, samples(a=100, b=50, c=30), 100 * MBIT)
    assert updated["b"] == PeerRate(5e7)
    assert updated["c"] == PeerRate(3e7, True)


def test_moved_peers_and_peers_without_comparison_are_ignored() -> None:
    now = Plan((1, 2), {"a": ROOT, "b": "a", "c": "a", "d": "c"})
    assert set(update_rates(now, CHAIN, {}, samples(a=100, b=90, c=20, d=20), 100 * MBIT)) == {"a", "b", "d"}
    assert set(update_rates(CHAIN, CHAIN, {}, samples(a=100, c=20), 100 * MBIT)) == {"a"}
    other = samples(a=100, b=20) | {"b": (2 * SIZE, 2e7)}
    assert set(update_rates(CHAIN, CHAIN, {}, other, 100 * MBIT)) == {"a"}


def test_an_estimate_falls_with_faults_and_rises_with_measured_rates() -> None:
    rate = PeerRate().own(1e8).own(2e7)
    assert rate == PeerRate(6e7, True)
    assert rate.at_least(5e7) is rate
    assert rate.at_least(9e7) == PeerRate(9e7, True)
    assert PeerRate(4e7).own(2e7) == PeerRate(2e7, True)  # a bound is no estimate


def test_peers_with_bounds_are_assumed_alike() -> None:
    rates = {"a": PeerRate(4e7, True), "b": PeerRate(3e7), "c": PeerRate(9e7), "d": PeerRate()}
    assert assumed_bps(rates, 9) == {"a": 4e7, "b": 4e7, "c": 9e7, "d": None}
    del rates["a"]
    assert assumed_bps(rates, PROBE_DEPTH + 1) == {"b": DEFAULT_PEER_BPS, "c": DEFAULT_PEER_BPS, "d": None}
    assert assumed_bps({"a": PeerRate(1e9)}, PROBE_DEPTH) == {"a": PROBE * 1e9}
    assert assumed_bps({"a": PeerRate(1e9)}, PROBE_DEPTH + 1) == {"a": 1e9}


@settings(deadline=None)
@given(st.lists(st.sampled_from([5.0, 20.0, 60.0, 100.0]), min_size=1, max_size=12))
def test_only_peers_slower_than_all_above_are_charged(limits: list[float]) -> None:
    peers = [f"p{i:02}" for i in range(len(limits))]
    chain = Plan((1, 1), {p: peers[i - 1] if i else ROOT for i, p in enumerate(peers)})
    came = {p: (SIZE, min(limits[: i + 1]) * MBIT) for i, p in enumerate(peers)}
    updated = update_rates(chain, chain, {}, came, 100 * MBIT)
    for i, peer in enumerate(peers):
        narrowest = limits[i] < min(limits[:i], default=100.0)
        assert updated[peer].exact == narrowest
        assert updated[peer].bps == pytest.approx(came[peer][1])
