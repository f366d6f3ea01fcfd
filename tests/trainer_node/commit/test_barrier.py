"""The barrier's rounds, without sockets or clocks."""

from __future__ import annotations

import pytest

from p2pcast.ground.version import Version
from trainer_node.commit.barrier import (
    EMPTY_TIMEOUTS,
    Barrier,
    BarrierPhase,
    CommitVersion,
    Decision,
    EngineReport,
    Failed,
    HoldShadows,
    Left,
    Opened,
    PeerReported,
    Sealed,
    Superseded,
    Switched,
    Tick,
    VersionAborted,
)

ONE, TWO, THREE, FOUR = (Version(0, n) for n in (1, 2, 3, 4))
TIMEOUT_S = 30.0


def at(committed: Version | None, staged: Version | None = None, ready: bool | None = None) -> dict[str, EngineReport]:
    return {"e": EngineReport(staged, committed, committed is not None if ready is None else ready)}


def in_service(peers: str, quorum: float = 0.9) -> Barrier:
    """All of ``peers`` serve version 0.1, which was committed; 0.2 has opened and is sealed at 0 s."""
    barrier = Barrier(TIMEOUT_S, quorum, ONE)
    barrier.handle(Sealed(ONE), 0.0)
    for name in peers:
        barrier.handle(PeerReported(name, at(ONE)), 0.0)
    assert barrier.handle(Opened(TWO), 0.0) == [HoldShadows(TWO)]
    assert barrier.handle(Sealed(TWO), 0.0) == []
    return barrier


def staged(barrier: Barrier, peers: str, version: Version = TWO, now: float = 1.0) -> list[Decision]:
    return [d for name in peers for d in barrier.handle(PeerReported(name, at(ONE, version)), now)]


def switched(barrier: Barrier, peers: str, version: Version = TWO, now: float = 2.0) -> list[Decision]:
    return [d for name in peers for d in barrier.handle(PeerReported(name, at(version, version)), now)]


def test_all_switch_when_all_have_staged():
    barrier = in_service("abc")
    assert staged(barrier, "ab") == []
    assert barrier.counts == (2, 3, 3)
    assert barrier.phase is BarrierPhase.GATHERING
    assert staged(barrier, "c") == [CommitVersion(TWO, 3, 3, ())]
    assert barrier.target == TWO
    assert barrier.phase is BarrierPhase.SWITCHING
    assert switched(barrier, "ab") == []
    assert switched(barrier, "c") == [Switched(TWO, ())]
    assert barrier.phase is BarrierPhase.IDLE
    assert barrier.hold == TWO


def test_no_version_is_committed_before_its_seal():
    barrier = Barrier(TIMEOUT_S, 0.9)
    barrier.handle(PeerReported("a", at(None)), 0.0)
    assert barrier.handle(Opened(ONE), 0.0) == [HoldShadows(ONE)]
    assert barrier.handle(PeerReported("a", at(None, ONE)), 1.0) == []
    assert barrier.handle(Sealed(ONE), 2.0) == [CommitVersion(ONE, 1, 1, ())]


def test_the_quorum_switches_when_the_time_is_up():
    barrier = in_service("abcdefghij")
    assert staged(barrier, "abcdefghi", now=5.0) == []
    assert barrier.deadline == 35.0
    assert barrier.handle(Tick(), 34.9) == []
    assert barrier.handle(Tick(), 35.0) == [CommitVersion(TWO, 9, 10, ("j",))]
    # The late one is not waited for while the others switch, nor in the next round.
    assert switched(barrier, "abcdefghi", now=36.0) == [Switched(TWO, ())]
    barrier.handle(Sealed(THREE), 37.0)
    assert barrier.counts == (0, 9, 9)
    # The late peer reaches the fleet's version, and is waited for from the next round on.
    switched(barrier, "j", now=38.0)
    assert barrier.counts == (0, 9, 9)
    for name in "abcdefghi":
        last = barrier.handle(PeerReported(name, at(TWO, THREE)), 39.0)
    assert last == [CommitVersion(THREE, 9, 9, ())]
    switched(barrier, "abcdefghi", THREE, 40.0)
    switched(barrier, "j", THREE, 40.0)
    barrier.handle(Sealed(FOUR), 41.0)
    assert barrier.counts == (0, 10, 9)


def test_the_time_runs_from_the_first_that_has_staged():
    barrier = in_service("ab")
    assert barrier.handle(Tick(), 200.0) == []
    staged(barrier, "a", now=250.0)
    assert barrier.deadline == 280.0


def test_below_quorum_no_engine_switches_and_the_failure_is_reported_once():
    barrier = in_service("abc")
    staged(barrier, "a", now=0.0)
    assert barrier.handle(Tick(), 30.0) == [Failed(TWO, 1, 3, 3, ("b", "c"))]
    assert barrier.phase is BarrierPhase.FAILED
    assert barrier.handle(Tick(), 31.0) == []
    assert barrier.target == ONE


def test_after_a_failure_the_quorum_may_still_come_together():
    barrier = in_service("abc")
    staged(barrier, "a", now=0.0)
    barrier.handle(Tick(), 30.0)
    assert staged(barrier, "b", now=40.0) == []
    assert staged(barrier, "c", now=50.0) == [CommitVersion(TWO, 3, 3, ())]


def test_after_a_failure_a_newer_version_takes_over():
    barrier = in_service("abc")
    staged(barrier, "a", now=0.0)
    barrier.handle(Tick(), 30.0)
    assert barrier.handle(Opened(THREE), 31.0) == []
    assert barrier.handle(Sealed(THREE), 32.0) == [Superseded(TWO, THREE), HoldShadows(THREE)]
    assert barrier.counts == (0, 3, 3)
    assert barrier.deadline is None


def test_a_newer_version_does_not_end_a_round_that_may_succeed():
    barrier = in_service("ab")
    staged(barrier, "a", now=0.0)
    for version in (THREE, FOUR):
        assert barrier.handle(Opened(version), 1.0) == []
        assert barrier.handle(Sealed(version), 1.0) == []
    assert staged(barrier, "b", now=2.0) == [CommitVersion(TWO, 2, 2, ())]
    assert switched(barrier, "a", now=3.0) == []
    # Of those that went by, the newest is next.
    assert switched(barrier, "b", now=3.0) == [Switched(TWO, ()), HoldShadows(FOUR)]


def test_an_open_version_is_held_at_when_no_newer_is_sealed():
    barrier = in_service("a")
    barrier.handle(Opened(THREE), 1.0)
    staged(barrier, "a")
    assert switched(barrier, "a") == [Switched(TWO, ()), HoldShadows(THREE)]
    assert barrier.handle(VersionAborted(THREE), 3.0) == []
    assert barrier.phase is BarrierPhase.IDLE
    assert barrier.hold == TWO
    assert barrier.handle(Opened(THREE), 4.0) == [HoldShadows(THREE)]


def test_an_aborted_target_gives_way_to_a_sealed_version():
    barrier = Barrier(TIMEOUT_S, 0.9)
    assert barrier.handle(Opened(ONE), 0.0) == [HoldShadows(ONE)]
    assert barrier.handle(VersionAborted(ONE), 1.0) == []
    assert barrier.hold is None
    assert barrier.handle(Sealed(TWO), 2.0) == [HoldShadows(TWO)]


@pytest.mark.parametrize("how", ["left", "died", "engine gone"])
def test_a_lost_peer_is_not_waited_for(how):
    barrier = in_service("abc")
    staged(barrier, "ab")
    event = {"left": Left("c"), "died": PeerReported("c", at(None, ready=False)), "engine gone": PeerReported("c", {})}[
        how
    ]
    assert barrier.handle(event, 2.0) == [CommitVersion(TWO, 2, 2, ())]


def test_an_engine_that_is_out_of_reach_is_waited_for_until_the_time_is_up():
    """The engine may return soon, and still serves its present version."""
    barrier = in_service("ab", quorum=0.5)
    staged(barrier, "a", now=0.0)
    assert barrier.handle(PeerReported("b", at(ONE, ready=False)), 1.0) == []
    assert barrier.handle(Tick(), 30.0) == [CommitVersion(TWO, 1, 2, ("b",))]


def test_an_engine_that_joins_in_mid_round_is_not_waited_for():
    barrier = in_service("ab")
    staged(barrier, "a")
    barrier.handle(PeerReported("c", at(ONE)), 1.0)
    assert barrier.counts == (1, 2, 2)
    assert staged(barrier, "b") == [CommitVersion(TWO, 2, 2, ())]


def test_engines_out_of_service_are_not_waited_for():
    barrier = Barrier(TIMEOUT_S, 0.9, TWO)
    barrier.handle(Sealed(TWO), 0.0)
    barrier.handle(PeerReported("a", at(TWO)), 0.0)
    barrier.handle(PeerReported("late", at(ONE)), 0.0)
    barrier.handle(PeerReported("empty", at(None)), 0.0)
    barrier.handle(PeerReported("unready", at(TWO, ready=False)), 0.0)
    barrier.handle(PeerReported("idle", {}), 0.0)
    barrier.handle(Sealed(THREE), 0.0)
    assert barrier.counts == (0, 1, 1)


def test_a_peer_has_staged_when_all_its_engines_have():
    barrier = Barrier(TIMEOUT_S, 0.9, ONE)
    barrier.handle(Sealed(ONE), 0.0)
    two = {"e": EngineReport(ONE, ONE, True), "f": EngineReport(ONE, ONE, True), "starting": EngineReport()}
    barrier.handle(PeerReported("a", two), 0.0)
    barrier.handle(Sealed(TWO), 0.0)
    assert barrier.handle(PeerReported("a", two | {"e": EngineReport(TWO, ONE, True)}), 1.0) == []
    both = {"e": EngineReport(TWO, ONE, True), "f": EngineReport(TWO, ONE, True), "starting": EngineReport()}
    assert barrier.handle(PeerReported("a", both), 1.0) == [CommitVersion(TWO, 1, 1, ())]


def test_without_a_peer_nothing_is_committed_and_the_newest_is_followed():
    barrier = Barrier(TIMEOUT_S, 0.9)
    assert barrier.handle(Sealed(ONE), 0.0) == [HoldShadows(ONE)]
    assert barrier.handle(Tick(), 1000.0) == []
    assert barrier.handle(Sealed(TWO), 1000.0) == [Superseded(ONE, TWO), HoldShadows(TWO)]
    assert barrier.handle(PeerReported("a", at(None)), 1001.0) == []
    assert barrier.handle(PeerReported("a", at(None, TWO)), 1002.0) == [CommitVersion(TWO, 1, 1, ())]


def test_an_engine_past_the_version_supersedes_the_round():
    barrier = in_service("ab")
    barrier.handle(Sealed(THREE), 1.0)
    assert barrier.handle(PeerReported("a", at(ONE, THREE)), 1.0) == [Superseded(TWO, THREE), HoldShadows(THREE)]


def test_a_report_of_an_unsealed_version_ends_no_round():
    barrier = in_service("ab")
    barrier.handle(Sealed(THREE), 1.0)
    assert barrier.handle(PeerReported("a", at(ONE, Version(9, 9))), 1.0) == []
    assert staged(barrier, "b") == [CommitVersion(TWO, 1, 1, ())]


def test_an_engine_past_all_known_versions_is_not_waited_for():
    barrier = in_service("ab")
    assert barrier.handle(PeerReported("a", at(ONE, THREE)), 1.0) == []
    assert barrier.counts == (0, 1, 1)
    assert staged(barrier, "b") == [CommitVersion(TWO, 1, 1, ())]


def test_a_version_that_no_peer_can_stage_is_superseded_at_last():
    barrier = in_service("ab")
    assert barrier.handle(Sealed(THREE), 1.0) == []
    assert barrier.handle(Tick(), EMPTY_TIMEOUTS * TIMEOUT_S - 1) == []
    assert barrier.handle(Tick(), EMPTY_TIMEOUTS * TIMEOUT_S) == [Superseded(TWO, THREE), HoldShadows(THREE)]


def test_an_engine_that_does_not_switch_delays_the_next_round_by_one_time_out():
    barrier = in_service("ab")
    staged(barrier, "ab", now=0.0)
    switched(barrier, "a", now=1.0)
    barrier.handle(Sealed(THREE), 2.0)
    assert barrier.handle(Tick(), 29.0) == []
    assert barrier.handle(Tick(), 30.0) == [Switched(TWO, (("b", "e"),)), HoldShadows(THREE)]
    assert barrier.counts == (0, 1, 1)


def test_an_engine_may_have_no_weights_during_a_switch():
    barrier = in_service("ab")
    staged(barrier, "ab", now=0.0)
    switched(barrier, "a", now=1.0)
    barrier.handle(Sealed(THREE), 1.0)
    assert barrier.handle(PeerReported("b", at(None, TWO)), 2.0) == []
    assert barrier.handle(PeerReported("b", at(TWO, TWO, ready=False)), 3.0) == []
    assert switched(barrier, "b", now=4.0) == [Switched(TWO, ()), HoldShadows(THREE)]
    assert barrier.counts == (0, 2, 2)


def test_a_hub_that_is_back_waits_for_its_peers_first():
    barrier = Barrier(TIMEOUT_S, 0.9, ONE, settled_at=10.0)
    assert barrier.handle(Sealed(TWO), 0.0) == [HoldShadows(TWO)]
    for name, now in (("a", 1.0), ("b", 4.0)):
        assert barrier.handle(PeerReported(name, at(ONE, TWO)), now) == []
    barrier.handle(PeerReported("c", at(ONE)), 9.0)
    assert barrier.handle(Tick(), 10.0) == []
    assert barrier.counts == (2, 3, 3)
    assert staged(barrier, "c", now=11.0) == [CommitVersion(TWO, 3, 3, ())]


def test_a_fleet_that_commits_independently_is_taken_over():
    """No version was ever committed by the hub, but all are at the newest."""
    barrier = Barrier(TIMEOUT_S, 0.9)
    for name in "ab":
        barrier.handle(PeerReported(name, at(TWO)), 0.0)
    assert barrier.handle(Sealed(TWO), 0.0) == [HoldShadows(TWO), CommitVersion(TWO, 2, 2, ()), Switched(TWO, ())]


@pytest.mark.parametrize(
    ("quorum", "peers", "needed"), [(0.9, 10, 9), (0.9, 9, 9), (0.7, 10, 7), (0.5, 3, 2), (0.0, 5, 1), (1.0, 7, 7)]
)
def test_how_many_a_quorum_is(quorum, peers, needed):
    barrier = in_service("abcdefghij"[:peers], quorum)
    assert barrier.counts == (0, peers, needed)
