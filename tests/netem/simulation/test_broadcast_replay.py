"""Broadcast of a version down a given tree: known results, and the use of the given tree."""

from __future__ import annotations

import math

import pytest

from netem.simulation.broadcast_replay import BroadcastFault, replay
from netem.simulation.fleet_simulator import FleetEvents
from topology.broadcast_time import BroadcastNetwork
from topology.plan_tree import ROOT

BPS = 16e6
TREE = {"a": ROOT, "b": "a", "c": "b", "d": ROOT, "e": "d"}
SCENARIO = FleetEvents(
    regions=1,
    payload_bytes=4e6,
    uplink_bps=1e12,
    peer_bps=BPS,
    network=BroadcastNetwork(near_rtt_s=0.0, root_region="region-0", hop_s=0.01),
)
PIECE_S = 8 * 65536 / BPS


def test_undisturbed_replay_takes_pipeline_time() -> None:
    times_s = replay(SCENARIO, TREE, [], chains=2)
    for peer, hops in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 2)):
        assert times_s[peer] == pytest.approx(2.0 + hops * (PIECE_S + 0.01), abs=1e-6)


def test_child_of_a_killed_parent_continues_from_its_backup() -> None:
    times_s = replay(SCENARIO, TREE, [BroadcastFault(1.0, "b")], chains=2)
    assert set(times_s) == set("acde")
    assert times_s["c"] == pytest.approx(2.0 + 2 * (PIECE_S + 0.01), abs=1e-6)


def test_slow_peer_is_bypassed_and_finishes_later() -> None:
    alone = replay(SCENARIO, {"a": ROOT, "b": "a"}, [BroadcastFault(1.0, "b", 0.25 * BPS)])
    times_s = replay(SCENARIO, TREE, [BroadcastFault(1.0, "b", 0.25 * BPS)], chains=2)
    assert times_s["b"] > times_s["c"]
    assert 2.2 < times_s["c"] < 4.0 < alone["b"], "found within a second, and not waited for"
    assert times_s["e"] == pytest.approx(2.0 + 2 * (PIECE_S + 0.01), abs=1e-6)


def test_disconnected_peer_resumes_and_its_children_do_not_wait() -> None:
    times_s = replay(SCENARIO, TREE, [BroadcastFault(1.0, "b", healed_s=4.0)], chains=2)
    assert 5.0 < times_s["b"] < 5.5, "half of it before, half of it after"
    assert 2.2 < times_s["c"] < 2.7
    for_long = replay(SCENARIO, TREE, [BroadcastFault(1.0, "b", healed_s=9.0)], chains=2)
    assert 10.0 < for_long["b"] < 10.5, "a peer that the hub has removed returns"
    assert for_long["c"] == times_s["c"]


def test_unreachable_peer_has_infinite_time() -> None:
    assert replay(SCENARIO, {"a": ROOT}, [BroadcastFault(0.5, "a", 1e-6)]) == {"a": math.inf}
