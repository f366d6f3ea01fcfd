"""The begin and the end of a peer's session."""

from __future__ import annotations

import pytest
from parts import emitted, ident, node
from recorded_fleet import Fleet

from p2pcast.ground.errors import RefusedError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Type

V = Version


async def test_a_peer_that_joins_is_welcomed_and_given_a_place(fleet: Fleet) -> None:
    link = fleet.join("a", held=V(0, 3))
    assert link.kinds() == [Type.WELCOME, Type.CATALOG, Type.PLAN]
    assert fleet.peer("a").staged == V(0, 3)
    assert (fleet.peer("a").host, fleet.peer("a").port) == ("192.0.2.1", 7)
    assert fleet.recall.calls == [("joined", ident("a"))]
    assert [e["peer"] for e in emitted(fleet.events, "joined")] == ["a"]
    assert fleet.membership.plan.parent[ident("a")] == ""


async def test_a_peer_uses_its_assigned_name(fleet: Fleet) -> None:
    assert fleet.join("b", name="taken").bodies(Type.WELCOME)[0]["name"] == "taken!"


async def test_a_peer_that_is_refused_has_no_session(fleet: Fleet) -> None:
    fleet.trust.refuses = True
    with pytest.raises(RefusedError):
        fleet.join("a")
    assert not fleet.sessions
    assert not fleet.membership.peers


async def test_a_node_that_joins_again_ends_its_older_session_alone(fleet: Fleet) -> None:
    old = fleet.join("a")
    new = fleet.join("a")
    assert isinstance(old.error, RemoteError)
    assert not new.closed
    assert fleet.forgotten == [ident("a")]
    assert fleet.sessions[ident("a")].link is new
    assert emitted(fleet.events, "left") == []


async def test_a_lost_peer_counts_as_failed_and_a_leaving_peer_does_not(fleet: Fleet) -> None:
    lost, leaves = fleet.join("a"), fleet.join("b")
    lost.close(RemoteError("cut"))
    leaves.hears(Type.LEAVE)
    assert [(e["peer"], e["lost"]) for e in emitted(fleet.events, "left")] == [("a", True), ("b", False)]
    assert fleet.forgotten == [ident("a"), ident("b")]
    assert [call[0] for call in fleet.recall.calls] == ["joined", "joined", "left", "left"]
    assert not fleet.sessions
    assert not fleet.membership.peers


async def test_a_hub_that_ends_reports_no_peer_as_lost(fleet: Fleet) -> None:
    link = fleet.join("a")
    fleet.joins.stop()
    link.close()
    assert emitted(fleet.events, "left") == []
    assert fleet.recall.calls == [("joined", ident("a"))]


async def test_a_link_that_never_joined_leaves_nothing(fleet: Fleet) -> None:
    fleet.link("a").close()
    assert fleet.recall.calls == []


async def test_a_lead_gets_its_members_and_a_member_its_lead(fleet: Fleet) -> None:
    lead = fleet.join("a", engine=("big", "lead"))
    member = fleet.join("b", engine=("big", "member"))
    assert lead.bodies(Type.ENGINE)[-1] == {"name": "big", "lead": None, "members": [node("b")]}
    assert member.bodies(Type.ENGINE)[-1]["lead"][0] == node("a")
    assert fleet.saved == ["leads of engines"]
    lead.close()
    assert member.bodies(Type.ENGINE)[-1] == {"name": "big", "lead": None}
    with pytest.raises(RefusedError):
        fleet.join("c", engine=("big", "lead"))
