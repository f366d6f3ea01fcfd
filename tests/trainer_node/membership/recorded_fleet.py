"""The handlers of a hub's control connections, over recorded links, without a hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from parts import HUB, FakeLink, ident, record_of

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.observers import Observers
from p2pcast.process.events import Events
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Catalog, Type
from topology.pull_sources import PullSources
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.join_handler import JoinHandler, SessionObservers
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, SessionHandlers, Sessions
from trainer_node.membership.plan_distributor import PlanDistributor
from trainer_node.membership.plan_upkeep import PlanUpkeep
from trainer_node.membership.reachability_prober import ReachabilityProber
from trainer_node.membership.report_handler import ArtifactReports, ReportHandler

JOIN = {"name": "a", "region": "r", "listen": ["", 7], "held": None, "engine": None}
REPORT: dict[str, Any] = {"staged": None, "committed": None, "parent": None}


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
        self.refuses = False

    def admit(self, session: PeerSession, name: str) -> str:
        if self.refuses:
            raise RefusedError("not you")
        return f"{name}!" if name == "taken" else name

    def learn_evictions(self, signed: list[bytes]) -> None:
        self.learnt += signed


class Fleet:
    """The handlers of a hub's sessions, with recorded neighbours."""

    def __init__(self) -> None:
        self.events = Events()
        self.sessions = Sessions()
        self.membership = Membership(1, 1e9)
        self.sources, self.progress = PullSources(), BroadcastProgress()
        metrics = FleetTimeline(self.events)
        self.broadcasts = BroadcastPlanner(self.membership, self.progress, metrics, self.sessions)
        self.known = {b"artifact"}
        identity = Identity(HUB, "hub", JoinToken(bytes(16), bytes(20)))
        prober, known = ReachabilityProber(self.membership.reach, identity, None), self.known.__contains__
        self.plans = PlanDistributor(self.membership, self.sessions, metrics, prober, self.sources, known)
        self.recall, self.trust = Recall(), Trust()
        self.forgotten: list[str] = []
        self.reported: list[str] = []
        memory = SimpleNamespace(facts={"leads": {}}, update=lambda: None)
        self.saved: list[str] = []
        leads = LeadDirectory(
            self.sessions, self.membership.reach, memory,
            later=lambda work, name: self.saved.append(name), in_thread=lambda work: None,
        )  # fmt: skip
        self.changes = 0
        self.wrong: list[str] = []
        upkeep = PlanUpkeep(HUB, self.membership, self.plans, self.broadcasts, self.events)
        sealed, wrong = {b"sealed"}.__contains__, self.wrong.extend
        artifacts = ArtifactReports(self.membership, self.plans, is_sealed=sealed, mirror_is_wrong=wrong)
        reported: Observers[[PeerRecord, float]] = Observers()
        reported.add(lambda peer, now: self._changed())
        reported.add(lambda peer, now: self.reported.append(peer.name))
        self.reports = ReportHandler(
            self.membership, upkeep, artifacts, self.recall, reported, self.trust.learn_evictions
        )
        followers = SessionObservers()
        followers.joined.add(lambda peer: self.recall.joined(peer.ident))
        followers.joined.add(metrics.joined)
        followers.left.add(lambda peer, why: self.recall.left(peer.ident))
        followers.left.add(metrics.left)
        followers.left.add(lambda peer, why: self._changed())
        followers.ended.add(self.forgotten.append)
        self.joins = JoinHandler(
            self.sessions, self.membership, upkeep, leads, followers, admit=self.trust.admit,
            welcome=lambda session: [record_of(Type.WELCOME, name=session.peer.name), Catalog([], [])],
        )  # fmt: skip

    def _changed(self) -> None:
        self.changes += 1

    def link(self, name: str) -> FakeLink:
        link = FakeLink(name)
        link.owner = PeerSession(link, SessionHandlers(self.joins, self.reports, self.plans, None, None))
        return link

    def join(self, peer: str, **more: Any) -> FakeLink:
        """``more``: fields of the message, ``name`` too."""
        link = self.link(peer)
        link.hears(Type.JOIN, **JOIN | {"name": peer} | more)
        return link

    def peer(self, name: str) -> Any:
        return self.membership.peers[ident(name)]
