"""Effects of the peers' messages: over recorded links, without a hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from parts import HUB, FakeLink, emitted, ident, node, record_of

from p2pcast.daemon.events import Events
from p2pcast.errors import RefusedError, RemoteError
from p2pcast.relay.child_lag import Inflow
from p2pcast.version import Version
from p2pcast.wire.connection import Identity
from p2pcast.wire.join_token import JoinToken
from p2pcast.wire.messages import Catalog, Type
from topology.pull_sources import Sources
from trainer_node.commit.barrier import Left
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_session import PeerSession, Sessions
from trainer_node.membership.plan_distributor import PlanDistributor
from trainer_node.membership.report_handler import ReportHandler

V = Version
JOIN = {"name": "a", "region": "r", "listen": ["", 7], "held": None, "engine": None}
REPORT: dict[str, Any] = {"staged": None, "committed": None, "parent": None}


class Barrier:
    def __init__(self) -> None:
        self.events: list[object] = []
        self.reports: list[str] = []

    def handle(self, event: object) -> None:
        self.events.append(event)

    def reported(self, peer: Any) -> None:
        self.reports.append(peer.name)


class Recall:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def joined(self, peer: str) -> None:
        self.calls.append(("joined", peer))

    def learn(self, peer: str, name: str, durable: Any, opened: Any) -> None:
        self.calls.append(("learn", name, durable, opened))

    def left(self, peer: str) -> None:
        self.calls.append(("left", peer))


class Trust:
    def __init__(self) -> None:
        self.learnt: list[Any] = []
        self.renewals: list[bytes] = []
        self.refuses = False

    def admit(self, session: PeerSession, name: str) -> str:
        if self.refuses:
            raise RefusedError("not you")
        return f"{name}!" if name == "taken" else name

    def learn_evictions(self, signed: list[bytes]) -> None:
        self.learnt += signed

    def renew_later(self, session: PeerSession, request: bytes) -> None:
        self.renewals.append(request)


class Fleet:
    """A handler with recorded neighbours."""

    def __init__(self) -> None:
        self.events = Events()
        self.sessions = Sessions()
        self.membership = Membership(1, 1e9)
        self.sources = Sources()
        self.progress = BroadcastProgress()
        metrics = FleetTimeline(self.events)
        self.broadcasts = BroadcastPlanner(self.membership, self.progress, metrics, self.sessions)
        identity = Identity(HUB, "hub", JoinToken(bytes(16), bytes(20)))
        self.known = {b"artifact"}
        self.plans = PlanDistributor(
            self.membership, self.sessions, metrics, self.events, identity, None, self.sources, self.known.__contains__
        )
        self.barrier, self.recall, self.trust = Barrier(), Recall(), Trust()
        memory = SimpleNamespace(facts={"leads": {}}, update=lambda: None)
        self.saved: list[str] = []
        leads = LeadDirectory(
            self.sessions, self.membership.reach, memory,
            later=lambda work, name: self.saved.append(name), in_thread=lambda work: None,
        )  # fmt: skip
        self.promise: Any = None
        self.changes = 0
        self.wrong: list[str] = []
        self.handler = ReportHandler(
            HUB, self.sessions, self.membership, self.plans, self.broadcasts, metrics, leads, self.barrier, self.recall,
            self.trust,
            welcome=lambda session: [record_of(Type.WELCOME, name=session.peer.name), Catalog([], [])],
            promise=lambda base, peer: self.promise, is_sealed=lambda artifact: artifact == b"sealed",
            fleet_changed=self._changed, mirror_is_wrong=self.wrong.extend,
        )  # fmt: skip

    def _changed(self) -> None:
        self.changes += 1

    def link(self, name: str) -> FakeLink:
        link = FakeLink(name)
        link.owner = PeerSession(link, self.handler, self.plans)
        return link

    def join(self, who: str, **more: Any) -> FakeLink:
        link = self.link(who)
        link.hears(Type.JOIN, **JOIN | {"name": who} | more)
        return link

    def peer(self, name: str) -> Any:
        return self.membership.peers[ident(name)]


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet()


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
    assert fleet.barrier.events == [Left(ident("a"))]
    assert fleet.sessions[ident("a")].link is new
    assert emitted(fleet.events, "left") == []


async def test_a_report_updates_the_peer_and_its_dependents(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(
        Type.REPORT,
        **REPORT
        | {"staged": V(0, 1), "committed": V(0, 1), "durable": [b"d"], "opened": [b"o"], "transfer": [4096, 10]},
    )
    peer = fleet.peer("a")
    assert (peer.staged, peer.committed, peer.transfers.good) == (V(0, 1), V(0, 1), 1)
    assert fleet.recall.calls[-1] == ("learn", "a", [b"d"], [b"o"])
    assert fleet.barrier.reports == ["a"]
    assert fleet.changes == 1


async def test_only_artifacts_of_the_run_are_remembered(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"held": [b"artifact", b"foreign"]})
    assert fleet.sources._held[ident("a")] == {b"artifact"}
    link.hears(Type.REPORT, **REPORT | {"dropped": [b"artifact"]})
    assert fleet.sources._held[ident("a")] == set()


async def test_missing_artifacts_count_only_once_sealed(fleet: Fleet) -> None:
    link, lacking = fleet.join("a"), []
    fleet.membership.note_lacking = lambda witness, rows, now: lacking.append(list(rows))  # type: ignore[method-assign]
    link.hears(Type.REPORT, **REPORT | {"lacking": [[b"sealed", node("b")], [b"sealed", None], [b"other", node("b")]]})
    assert lacking == [[(b"sealed", ident("b")), (b"sealed", None)]]


async def test_evictions_wrong_objects_and_garbage_are_passed_on(fleet: Fleet) -> None:
    first, link = fleet.join("b"), fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"evicted": [b"signed"], "spoilt": ["ready/1"], "garbled": [[node("b"), 30]]})
    assert fleet.trust.learnt == [b"signed"]
    assert fleet.wrong == ["ready/1"]
    assert [e["peer"] for e in emitted(fleet.events, "garbled")] == ["b"]
    assert not first.closed


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


async def test_invalid_values_are_counted_and_reported_once_a_session(fleet: Fleet, caplog) -> None:
    link = fleet.join("a")
    for _ in range(2):
        link.hears(Type.REPORT, ("engines", "cores"), **REPORT)
    assert fleet.handler.odd_reports == 2
    assert caplog.text.count("invalid values") == 1


async def test_a_squash_is_promised_or_not(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(Type.SQUASH, base=V(0, 1))
    fleet.promise = SimpleNamespace(version=V(0, 5), bytes=100, wait_s=0.5)
    link.hears(Type.SQUASH, base=V(0, 1))
    assert link.bodies(Type.SQUASHING) == [
        {"base": [0, 1], "version": None, "bytes": 0, "wait_us": 0},
        {"base": [0, 1], "version": [0, 5], "bytes": 100, "wait_us": 500_000},
    ]


async def test_a_lost_peer_counts_as_failed_and_a_leaving_peer_does_not(fleet: Fleet) -> None:
    lost, leaves = fleet.join("a"), fleet.join("b")
    lost.close(RemoteError("cut"))
    leaves.hears(Type.LEAVE)
    assert [(e["peer"], e["lost"]) for e in emitted(fleet.events, "left")] == [("a", True), ("b", False)]
    assert fleet.barrier.events == [Left(ident("a")), Left(ident("b"))]
    assert [call[0] for call in fleet.recall.calls] == ["joined", "joined", "left", "left"]
    assert not fleet.sessions
    assert not fleet.membership.peers


async def test_a_hub_that_ends_reports_no_peer_as_lost(fleet: Fleet) -> None:
    link = fleet.join("a")
    fleet.handler.stop()
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
