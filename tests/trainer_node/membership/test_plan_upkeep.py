"""Changes of the plan because of reports."""

from __future__ import annotations

from parts import HUB, ident
from recorded_fleet import REPORT, Fleet

from p2pcast.ground.version import Version
from p2pcast.relay.child_lag import Inflow
from p2pcast.wire.messages import Type

V = Version


async def test_a_peers_own_move_changes_the_plan(fleet: Fleet) -> None:
    for name in "abc":
        fleet.join(name)
    plan = fleet.membership.plan
    other = next(p for p in "abc" if plan.parent[ident(p)] != "")
    link = fleet.sessions[ident(other)].link
    link.hears(Type.REPORT, **REPORT | {"parent": HUB, "epoch": (9, 0)})
    assert fleet.membership.plan.parent[ident(other)] == ""
    assert fleet.membership.plan.epoch > plan.epoch


async def test_a_slow_peer_is_moved_during_a_broadcast_alone(fleet: Fleet) -> None:
    link, asked = fleet.join("a"), []

    def progressed(peer: str, now: float, inflow: Inflow) -> bool:
        asked.append((peer, inflow))
        return True

    fleet.membership.note_inflow = progressed  # type: ignore[method-assign]
    report = REPORT | {"inflow": [1000, 2_000_000, 5]}
    link.hears(Type.REPORT, **report)
    assert asked == []
    fleet.broadcasts.begin(V(0, 1))
    link.hears(Type.REPORT, **report)
    assert asked == [(ident("a"), Inflow(1000, 2.0, 5))]
    fleet.broadcasts.end()
    link.hears(Type.REPORT, **report)
    assert len(asked) == 1


async def test_the_last_peer_to_stage_a_version_ends_its_broadcast(fleet: Fleet) -> None:
    link = fleet.join("a")
    fleet.broadcasts.begin(V(0, 1))
    assert fleet.progress.under_way
    link.hears(Type.REPORT, **REPORT | {"staged": V(0, 1)})
    assert not fleet.progress.under_way
