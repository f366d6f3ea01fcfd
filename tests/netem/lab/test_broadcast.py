"""Computations and refusals of the broadcast experiment. test_fault.py runs its processes."""

from __future__ import annotations

from unittest.mock import call, create_autospec

import pytest

from netem.broadcast.emulated_fleet import BroadcastFleet
from netem.emulation.description import HUB, EmulatedLink, EmulatedNetwork, Host, Region
from netem.emulation.namespaces import Namespaces
from netem.lab.case_events import EventPlayer, longest_silence_s
from netem.lab.experiments.broadcast import Parameters, results, sent_twice
from netem.lab.model_prediction import FeedTree
from netem.lab.network_tables import NetworkEvent
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MIB

PIECE = piece_bytes(10 * MIB)
FAST = EmulatedLink(20e6, 20e6, 0.05)
CHAIN = FeedTree(
    EmulatedNetwork(tuple(Host(name, FAST) for name in (HUB, "a", "b", "c"))), {"a": HUB, "b": "a", "c": "b"}
)
SHARE = CHAIN.share(10 * MIB)


def test_tree_depth_and_delays() -> None:
    assert (CHAIN.chains, CHAIN.depth, CHAIN.peer_bps) == (1, 3, 20e6)
    assert CHAIN.half_rtts_s == pytest.approx(3 * 0.1)
    fork = FeedTree(CHAIN.network, {"a": HUB, "b": HUB, "c": "b"})
    assert (fork.chains, fork.depth, fork.half_rtts_s) == (2, 2, pytest.approx(0.2))
    with pytest.raises(UsageError, match="a loop at"):
        _ = FeedTree(CHAIN.network, {"a": "b", "b": "a", "c": HUB}).depth


def test_a_chain_is_predicted_as_a_pipeline() -> None:
    """The payload once at the rate minus headers, its delay and a round trip for each hop, and a piece for each hop but
    the first.
    """
    bps = 20e6 * SHARE
    assert 0.94 < SHARE < 0.97
    predicted_s = CHAIN.predicted_s(10 * MIB)
    assert predicted_s == pytest.approx(80 * MIB / bps + 3 * (0.1 + 0.2) + 2 * 8 * PIECE / bps, rel=1e-6)
    assert CHAIN.predicted_s(10 * MIB, [NetworkEvent(1.0, "stop", "b", 1)]) is None
    slowed = CHAIN.predicted_s(10 * MIB, [NetworkEvent(0.5, "degrade", "b", 1, EmulatedLink(2e6, 2e6, 0.05))])
    assert slowed is not None and predicted_s is not None and slowed > 2 * predicted_s  # noqa: PT018


def test_only_modelled_events_are_predicted() -> None:
    whole = CHAIN.predicted_s(10 * MIB)
    cut, heal = NetworkEvent(1.0, "cut", "c", 1), NetworkEvent(8.0, "heal", "c", 1)
    away = CHAIN.predicted_s(10 * MIB, [cut, heal])
    assert whole is not None and away is not None and 6.0 < away - whole < 8.5  # noqa: PT018
    assert all(
        CHAIN.predicted_s(10 * MIB, [e]) is None
        for e in (cut, heal, NetworkEvent(1.0, "join", "c", 1), NetworkEvent(1.0, "stop", "c", 1))
    )


def test_peers_behind_a_trunk_share_its_rate() -> None:
    regions = (Region("far", EmulatedLink(5e6, 5e6, 0.1)),)
    network = EmulatedNetwork((Host(HUB, FAST), Host("a", FAST, "far"), Host("b", FAST, "far")), regions=regions)
    tree = FeedTree(network, {"a": HUB, "b": "a"}, {"a": 4, "b": 2})
    relayed = tree.predicted_s(10 * MIB)
    each = FeedTree(network, {"a": HUB, "b": HUB}).predicted_s(10 * MIB)
    share = tree.share(10 * MIB)
    alone_s = 80 * MIB / (5e6 * share)
    held_s = 2 * 8 * PIECE / (1.25 * 5e6 * share)
    assert held_s > 2 * 8 * PIECE / (20e6 * share)
    assert share < SHARE, "a hash of each piece on each stripe"
    assert relayed == pytest.approx(alone_s + 3 * (0.2 + 0.1) + held_s, rel=1e-6), (
        "a forwards no faster than it receives"
    )
    assert each == pytest.approx(2 * alone_s, rel=0.05)


def test_trunk_limits_the_predicted_rate() -> None:
    regions = (Region("far", EmulatedLink(5e6, 5e6, 0.1)),)
    tree = FeedTree(
        EmulatedNetwork((Host(HUB, FAST), Host("a", FAST, "far"), Host("b", FAST, "far")), regions=regions),
        {"a": HUB, "b": "a"},
    )
    assert tree.peer_bps == 5e6
    assert tree.half_rtts_s == pytest.approx(0.2 + 0.1)


def test_peer_behind_two_cuts_is_awaited_after_both_heal() -> None:
    net, fleet = create_autospec(Namespaces, instance=True), create_autospec(BroadcastFleet, instance=True)
    net.network = EmulatedNetwork(
        (Host(HUB, FAST), Host("a", FAST, "far"), Host("b", FAST)), regions=(Region("far", FAST),)
    )
    with EventPlayer(net, fleet) as timeline:
        for do, place in (("cut", "a"), ("cut", "far"), ("heal", "far"), ("heal", "a")):
            timeline.apply(NetworkEvent(0.0, do, place))
    assert fleet.expect.mock_calls == [call("a", there=there) for there in (False, False, False, True)]


def test_silence_is_the_longest_time_without_a_piece() -> None:
    seen = [(0.1 * at, 100_000 * at) for at in range(11)] + [
        (1.0 + 0.1 * at, 1_000_000 + 500 * at) for at in range(1, 11)
    ]
    seen += [(2.0 + 0.1 * at, 1_005_000 + 100_000 * at) for at in range(1, 11)]
    assert longest_silence_s(seen, 0.0, 3.0, 65536) == pytest.approx(1.1)
    assert longest_silence_s(seen, 0.0, 0.95, 65536) == pytest.approx(0.1)
    assert longest_silence_s(seen, 1.5, 3.0, 65536) == pytest.approx(0.6)
    assert longest_silence_s([], 1.0, 3.0, 65536) == 2.0


@pytest.mark.parametrize(
    ("parameters", "events", "why"),
    [
        ({}, [], "payload_mib is missing"),
        ({"payload_mib": 0.0}, [], "payload_mib is 0"),
        ({"payload_mib": 4, "systems": ["carrier pigeon"]}, [], "carrier pigeon"),
        ({"payload_mib": 4, "systems": ["star"]}, [{"do": "kill", "host": "p1"}], "apply to p2pcast alone"),
        ({"payload_mib": 4, "rounds": 2}, [{"do": "kill", "host": "p1", "version": 3}], "is set for version 3"),
        ({"payload_mib": 4, "chain": 2}, [], "parameters.chain"),
    ],
)
def test_invalid_parameters_are_refused_before_any_work(
    parameters: dict[str, object], events: list[object], why: str
) -> None:
    network = {"hosts": [{"name": "hub", "rate": "20mbit"}, {"name": "p", "count": 2, "rate": "20mbit"}]}
    with pytest.raises(UsageError, match=why):
        next(results({"network": network, "events": events, "parameters": parameters}))


def test_default_system_is_p2pcast() -> None:
    assert Parameters(4.0).systems == ("p2pcast",)


def test_unlimited_links_have_no_prediction() -> None:
    free, above = EmulatedLink(None, None, 0.05), {"a": HUB, "b": "a"}
    assert (
        FeedTree(EmulatedNetwork((Host(HUB, FAST), Host("a", free), Host("b", free))), above).predicted_s(MIB) is None
    )
    assert (
        FeedTree(EmulatedNetwork((Host(HUB, free), Host("a", FAST), Host("b", FAST))), above).predicted_s(MIB) is None
    )
    delayed = NetworkEvent(0.5, "degrade", "b", 1, EmulatedLink(None, None, 0.2))
    assert CHAIN.predicted_s(MIB, [delayed]) is None


def test_bytes_sent_twice_between_two_readings() -> None:
    assert sent_twice({"a": 5, "b": 7}, {"a": 5, "b": 9, "c": 1}) == 3
    assert sent_twice({"a": 5}, {"a": 2}) == 2, "the process was restarted"
    assert sent_twice({"a": 5, "b": 7}, {"a": 5}) == 0
