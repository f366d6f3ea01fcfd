"""When the plan changes: not during a broadcast, except around a peer that is behind."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from p2pcast.ground.version import Version
from p2pcast.relay.child_lag import Inflow
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.broadcast_progress import BroadcastProgress

V = Version
BEHIND = Inflow(1000, 1.0, 10**9)


class Membership:
    def __init__(self) -> None:
        self.detached: frozenset[str] = frozenset()
        self.calls: list[str] = []

    def begin_version(self) -> None:
        self.calls.append("begin")

    def note_inflow(self, ident: str, now: float, inflow: Inflow) -> bool:
        self.calls.append(f"inflow {ident}")
        return True

    def replan(self, now: float) -> bool:
        self.calls.append("replan")
        return True

    def repair(self, now: float) -> bool:
        self.calls.append("repair")
        return False


class Fleet:
    def __init__(self, **staged: Version | None) -> None:
        self.membership = Membership()
        self.sessions: dict[str, Any] = {
            ident: SimpleNamespace(peer=SimpleNamespace(staged=version)) for ident, version in staged.items()
        }
        timeline: Any = SimpleNamespace(began=lambda version, now: None)
        membership: Any = self.membership
        self.planner = BroadcastPlanner(membership, BroadcastProgress(), timeline, self.sessions)

    def stage(self, ident: str, version: Version) -> None:
        self.sessions[ident].peer.staged = version


def test_the_plan_stays_during_a_broadcast_and_is_made_anew_at_its_end() -> None:
    fleet, now = Fleet(a=V(0, 0), b=V(0, 0)), time.monotonic()
    fleet.planner.begin(V(0, 1))
    assert not fleet.planner.update(now)
    fleet.stage("a", V(0, 1))
    assert not fleet.planner.update(now)
    assert fleet.membership.calls == ["begin"]
    fleet.stage("b", V(0, 1))
    assert fleet.planner.update(now)
    assert fleet.membership.calls == ["begin", "replan"]


def test_between_two_broadcasts_the_plan_is_repaired() -> None:
    fleet = Fleet(a=V(0, 1))
    assert not fleet.planner.update(time.monotonic())
    fleet.planner.begin(V(0, 2))
    fleet.planner.update(time.monotonic())
    fleet.planner.end()
    fleet.planner.update(time.monotonic())
    assert fleet.membership.calls == ["repair", "begin", "repair"]


def test_a_slow_peer_counts_while_the_broadcast_waits_for_the_peer() -> None:
    fleet, now = Fleet(a=V(0, 0), b=V(0, 0)), time.monotonic()
    assert not fleet.planner.slowed("a", now, BEHIND)
    fleet.planner.begin(V(0, 1))
    assert fleet.planner.slowed("a", now, BEHIND)
    fleet.stage("a", V(0, 1))
    fleet.planner.update(now)
    assert not fleet.planner.slowed("a", now, BEHIND)


def test_a_broadcast_does_not_wait_for_detached_peers() -> None:
    fleet = Fleet(a=V(0, 1), b=V(0, 0))
    fleet.planner.begin(V(0, 1))
    fleet.membership.detached = frozenset({"b"})
    assert fleet.planner.update(time.monotonic())
