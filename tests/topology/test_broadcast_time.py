"""The broadcast-time model against a pipeline simulated piece by piece, and against arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.broadcast_time import (
    DEFAULT_PEER_BPS,
    BroadcastNetwork,
    chain_time_s,
    chain_times_s,
    fair_shares,
    ideal_s,
    median_bps,
    number_of_chains,
    predict,
    time_to_last_s,
)
from topology.plan_tree import ROOT, Plan, PlanError, PlanMember

MBIT = 1e6
NEAR = BroadcastNetwork(piece_bytes=1_000, near_rtt_s=0.0, far_rtt_s=0.0)


def simulate(pieces: int, piece_bytes: int, rates_bps: list[float], rtts_s: list[float]) -> float:
    """Store and forward, piece by piece: a hop starts a piece once it has it whole and has sent the one before."""
    arrived = [0.0] * pieces
    for rate, rtt in zip(rates_bps, rtts_s, strict=True):
        free = 0.0
        for index in range(pieces):
            free = max(free, arrived[index]) + 8.0 * piece_bytes / rate
            arrived[index] = free + rtt / 2
    return arrived[-1]


HOPS = st.lists(st.tuples(st.floats(1e3, 1e10), st.floats(0, 1)), min_size=1, max_size=6)


@settings(deadline=None)
@given(HOPS, st.integers(1, 40), st.integers(1, 1 << 20))
def test_chain_time_is_that_of_the_pipeline(hops: list[tuple[float, float]], pieces: int, piece_bytes: int) -> None:
    rates, rtts = [r for r, _ in hops], [t for _, t in hops]
    expected = simulate(pieces, piece_bytes, rates, rtts)
    assert chain_time_s(pieces * piece_bytes, rates, piece_bytes, rtts) == pytest.approx(expected, rel=1e-9)
    times = chain_times_s(pieces * piece_bytes, rates, piece_bytes, rtts)
    assert times == sorted(times)


def test_one_hop_is_the_ideal_and_half_a_round_trip() -> None:
    assert ideal_s(25_000_000, 100 * MBIT) == 2.0
    assert chain_time_s(25_000_000, [100 * MBIT], 64 << 10, [0.1]) == pytest.approx(2.05)
    assert chain_time_s(25_000_000, [], 64 << 10, []) == 0.0
    with pytest.raises(ValueError):
        chain_time_s(1, [1.0], 1, [])


@pytest.mark.parametrize(
    ("uplink", "peers", "n", "chains"),
    [
        (300, [100] * 9, 9, 3),
        (399, [100] * 9, 9, 3),
        (300, [100] * 2, 2, 2),
        (50, [100] * 4, 4, 1),
        (300, [100, None, 50, 150], 4, 3),
        (300, [None] * 5, 5, 3),
        (299, [100] * 9, 9, 2),
        (1e300, [100] * 9, 9, 9),
        (300, [0, 0, 0], 3, 3),
        (300, [], 0, 0),
    ],
)
def test_number_of_chains(uplink: float, peers: list[float | None], n: int, chains: int) -> None:
    assert number_of_chains(uplink * MBIT, [None if p is None else p * MBIT for p in peers], n) == chains


@pytest.mark.parametrize("uplink", [0.0, -1.0, float("nan")])
def test_a_nonpositive_uplink_is_refused(uplink: float) -> None:
    with pytest.raises(PlanError, match="uplink"):
        number_of_chains(uplink, [], 3)


def test_the_median_ignores_unknown_rates() -> None:
    assert median_bps([None, None]) == DEFAULT_PEER_BPS
    assert median_bps([None, 10 * MBIT, 30 * MBIT, 20 * MBIT]) == 20 * MBIT


@settings(deadline=None)
@given(st.floats(1, 1e10), st.lists(st.floats(1, 1e10), min_size=1, max_size=20))
def test_shares_are_fair_and_use_the_whole_capacity(capacity: float, demands: list[float]) -> None:
    shares = fair_shares(capacity, demands)
    assert sum(shares) == pytest.approx(min(capacity, sum(demands)))
    assert all(0 < s <= d for s, d in zip(shares, demands, strict=True))
    cut_short = [s for s, d in zip(shares, demands, strict=True) if s < d]
    assert all(s >= max(shares) * (1 - 1e-9) for s in cut_short)  # no share cut short is below another


def test_the_uplink_is_shared_by_its_chains() -> None:
    members = [PlanMember(c, bps=100 * MBIT) for c in "abcd"]
    star = Plan((1, 1), dict.fromkeys("abcd", ROOT))
    chains = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c"})
    payload = 25_000_000
    assert time_to_last_s(star, members, payload, 200 * MBIT, NEAR) == pytest.approx(4.0)
    assert time_to_last_s(chains, members, payload, 200 * MBIT, NEAR) == pytest.approx(2.0 + 8_000 / 1e8)
    assert time_to_last_s(Plan((1, 1), {}), [], payload, 1.0) == 0.0


def test_two_children_halve_a_rate_and_stretch_finds_delayed_peers() -> None:
    members = [
        PlanMember("a", bps=100 * MBIT),
        PlanMember("b", bps=100 * MBIT),
        PlanMember("c", bps=100 * MBIT),
        PlanMember("s", bps=MBIT),
    ]
    fork = Plan((1, 1), {"a": ROOT, "b": "a", "c": "a", "s": "b"})
    assert predict(fork, members, 25_000_000, 1e9, NEAR).times_s["c"] == pytest.approx(4.0, rel=1e-3)
    slow_last = predict(Plan((1, 1), {"a": ROOT, "b": "a", "c": "b", "s": "c"}), members, 25_000_000, 1e9, NEAR)
    slow_amid = predict(Plan((1, 1), {"a": ROOT, "s": "a", "b": "s", "c": "b"}), members, 25_000_000, 1e9, NEAR)
    assert slow_last.last_s == pytest.approx(slow_amid.last_s, rel=1e-3)
    assert slow_last.stretch == pytest.approx(1.0, rel=1e-2)
    assert slow_amid.stretch == pytest.approx(100.0, rel=1e-2)


def test_a_peer_faster_than_the_fleet_is_not_a_reason_to_replan() -> None:
    members = [PlanMember("a", bps=100 * MBIT), PlanMember("b", bps=1e10), PlanMember("c", bps=100 * MBIT)]
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b"})
    assert predict(plan, members, 25_000_000, 100 * MBIT, NEAR).stretch == pytest.approx(1.0, rel=1e-3)


def test_hops_between_regions_take_longer() -> None:
    network = BroadcastNetwork(piece_bytes=1, near_rtt_s=0.01, far_rtt_s=0.2, root_region="eu")
    members = [PlanMember("a", "eu", 8.0), PlanMember("b", "us", 8.0), PlanMember("c", "us", 8.0)]
    times = predict(Plan((1, 1), {"a": ROOT, "b": "a", "c": "b"}), members, 10, 1e9, network).times_s
    assert times["b"] - times["a"] == pytest.approx(8.0 / 8e3 + 0.1)
    assert times["c"] - times["b"] == pytest.approx(8.0 / 8e3 + 0.005)


def test_a_stranger_in_the_plan_is_named() -> None:
    with pytest.raises(PlanError, match="'b'"):
        time_to_last_s(Plan((1, 1), {"a": ROOT, "b": "a"}), [PlanMember("a")], 1, 1.0)
