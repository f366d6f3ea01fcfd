"""When a broadcast is over."""

from __future__ import annotations

from p2pcast.ground.version import Version
from trainer_node.membership.broadcast_progress import SETTLED_S, BroadcastProgress

OLD, NEW = Version(0, 3), Version(0, 4)


def test_the_last_peer_ends_the_broadcast_and_its_time_is_reported_once() -> None:
    broadcast = BroadcastProgress()
    assert not broadcast.settled({"a": NEW}, 0.0)
    broadcast.begin(NEW, ["a", "b"], 10.0)
    assert not broadcast.settled({"a": NEW, "b": OLD}, 11.0)
    assert broadcast.time_to_last_s is None
    assert broadcast.settled({"a": NEW, "b": NEW, "late": None}, 12.5)
    assert broadcast.time_to_last_s == 2.5
    assert not broadcast.settled({"a": NEW, "b": NEW}, 13.0)


def test_a_peer_that_left_is_not_waited_for_and_a_peer_without_versions_is() -> None:
    broadcast = BroadcastProgress()
    broadcast.begin(NEW, ["a", "b"], 0.0)
    assert not broadcast.settled({"a": None, "b": NEW}, 1.0)
    assert broadcast.settled({"b": NEW}, 2.0)


def test_a_broadcast_ends_after_its_time_limit() -> None:
    broadcast = BroadcastProgress()
    broadcast.begin(NEW, ["a"], 0.0)
    assert not broadcast.settled({"a": OLD}, SETTLED_S)
    assert broadcast.under_way
    assert broadcast.settled({"a": OLD}, SETTLED_S + 1)
    assert not broadcast.under_way
    assert broadcast.time_to_last_s is None


def test_in_a_long_broadcast_the_awaited_peers_are_known_until_the_last_has_staged() -> None:
    broadcast = BroadcastProgress()
    broadcast.begin(NEW, ["a", "b"], 0.0)
    assert broadcast.settled({"a": OLD, "b": OLD}, SETTLED_S + 1)
    assert not broadcast.settled({"a": NEW, "b": OLD}, 10 * SETTLED_S)  # planned already
    assert broadcast.awaited == {"b"}
    assert not broadcast.settled({"a": NEW, "b": NEW}, 11 * SETTLED_S)
    assert broadcast.time_to_last_s == 11 * SETTLED_S
    assert not broadcast.awaited


def test_a_newer_version_replaces_and_a_failed_version_ends_the_broadcast() -> None:
    broadcast = BroadcastProgress()
    broadcast.begin(OLD, ["a"], 0.0)
    broadcast.begin(NEW, ["a"], 5.0)
    assert not broadcast.settled({"a": OLD}, 6.0)
    broadcast.end()
    assert not broadcast.settled({"a": NEW}, 7.0)
    assert broadcast.time_to_last_s is None


def test_a_broadcast_without_peers_has_no_time() -> None:
    broadcast = BroadcastProgress()
    broadcast.begin(NEW, [], 0.0)
    assert broadcast.settled({"late": None}, 1.0)
    assert broadcast.time_to_last_s is None


def test_a_few_that_are_far_behind_hold_up_no_planning() -> None:
    broadcast = BroadcastProgress()
    peers = [f"p{n}" for n in range(20)]
    broadcast.begin(NEW, peers, 0.0)
    most = dict.fromkeys(peers, NEW) | {"p0": OLD}
    assert not broadcast.settled(most | {"p1": OLD, "p2": OLD}, 4.0)  # too many
    assert not broadcast.settled(most, 5.0)
    assert not broadcast.settled(most, 10.0)
    assert broadcast.settled(most, 10.5)
    assert not broadcast.settled(most, 11.0)
    assert broadcast.awaited == {"p0"}
    assert not broadcast.settled(most | {"p0": NEW}, 12.0)  # planned already
    assert broadcast.time_to_last_s == 12.0
