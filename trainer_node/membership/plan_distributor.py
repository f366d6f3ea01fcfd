"""Informs each peer about others: its parent and backups, how to reach them, dial requests, and sources to pull from.

Guarantees: a peer is sent only what is new to it. A changed plan is sent to the peers near the change, or to all peers
after a change of reachability.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from p2pcast.wire import messages
from topology.fallback_neighbours import neighbours_of
from topology.plan_tree import ROOT
from topology.pull_sources import PullSources
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession
from trainer_node.membership.reachability_prober import ReachabilityProber

BACKUPS = 8
"""Most ancestors that are sent to a peer; a peer that loses all of them turns to the hub."""


class PlanDistributor:
    """``sessions``: by peer. ``sources``: which peers hold which artifacts."""

    def __init__(
        self,
        membership: Membership,
        sessions: Mapping[str, PeerSession],
        fleet: FleetTimeline,
        prober: ReachabilityProber,
        sources: PullSources,
        knows: Callable[[bytes], bool],
    ) -> None:
        self.sources = sources
        self.knows = knows
        """Whether the hub has an artifact. Reports about other artifacts are not remembered."""
        self.prober = prober
        prober.changed.add(self._reach_changed)
        self._membership = membership
        self._sessions = sessions
        self._fleet = fleet
        self._known_reach: tuple[int, bool] = (-1, True)

    # -- places

    def send_plans(self) -> None:
        """Send the newest plan to the peers near its changes, or to all peers after a change of reachability."""
        plan, reach, now = self._membership.plan, self._membership.reach, time.monotonic()
        peers = self._membership.peers
        moved, near = self._membership.take_changes()
        self._fleet.plan_changed(
            plan.epoch, [[peers[p].name, "hub" if above == ROOT else peers[above].name] for p, above in moved.items()]
        )
        known, self._known_reach = self._known_reach, (reach.turn, reach.plain)
        for ident in near if known == self._known_reach and reach.plain else self._sessions:
            session = self._sessions[ident]
            parent = peers.get(plan.parent[ident])
            # Dialling back needs the hub. Neighbours are needed when the hub is gone, so they must be dialled directly.
            backups = [
                peers[b]
                for b in plan.backups(ident, BACKUPS)
                if b in peers and (reach.plain or reach.links(b, ident, now))
            ]
            neighbours = [peers[n] for n in neighbours_of(plan, ident) if reach.plain or reach.dials(ident, n, now)]
            named = [p for p in (parent, *backups, *neighbours) if p is not None]
            if session.is_news(reach.turn, tuple(p.place for p in named)):
                session.send_ways([self._ways(ident, p, now) for p in named])
            session.send_plan(plan.epoch, None if parent is None else parent.place, [b.place for b in backups])
            session.send_neighbours([n.place for n in neighbours])

    def _ways(self, ident: str, peer: PeerRecord, now: float) -> messages.Route:
        reach = self._membership.reach
        ways = reach.ways(ident, peer.ident)
        return bytes.fromhex(peer.ident), bool(ways) and reach.dials(ident, peer.ident, now), ways

    # -- reachability

    def _reach_changed(self) -> None:
        """Update and send the plan: the prober has learnt which peers can be reached."""
        self._membership.reach_changed(time.monotonic())
        self.send_plans()

    def note_link(self, peer: PeerRecord, above: str) -> None:
        """Record that the peer above feeds this one, so one of the two was able to dial the other."""
        made = (above, peer.ident) if peer.dialled_by_parent else (peer.ident, above)
        self._membership.reach.reached(*made)
        self.prober.wake()

    def on_dial_request(self, session: PeerSession, body: messages.Call) -> None:
        """Handle CALL: ask another peer to dial this one."""
        peer, target = session.peer, body.node.hex()
        assert peer is not None
        ways, other = self._membership.reach.ways(target, peer.ident), self._sessions.get(target)
        if other is None or not ways:
            session.link.send(messages.Unreachable(body.node))
        else:
            other.link.send(messages.Called(session.link.remote, body.stripes, ways))

    def on_unreachable(self, session: PeerSession, node: bytes) -> None:
        """Handle UNREACHABLE: the peer could not dial another peer."""
        peer = session.peer
        assert peer is not None
        self._membership.reach.unreached(peer.ident, node.hex(), time.monotonic())
        if (other := self._sessions.get(node.hex())) is not None:
            other.link.send(messages.Unreachable(session.link.remote))
        self.prober.probe(node.hex())
        self.prober.wake()

    # -- sources

    def on_source_request(self, session: PeerSession, body: messages.FindSources) -> None:
        """Handle FIND_SOURCES: send the peer a list of peers that hold an artifact."""
        peer, peers, reach, now = session.peer, self._membership.peers, self._membership.reach, time.monotonic()
        assert peer is not None
        ident, region = peer.ident, peer.region
        unfit = {node.hex() for node in body.without} | self._membership.detached | self._membership.demoted(now)
        holders: list[str] = []
        if self.knows(body.artifact):
            holders = self.sources.seek(ident, body.artifact, unfit, lambda p: peers[p].region == region)
        found = [peers[p] for p in holders if p in peers]
        found = [p for p in found if reach.plain or reach.links(p.ident, ident, now)]
        session.link.send(messages.Addresses([self._ways(ident, p, now) for p in found]))
        session.link.send(messages.Sources(body.artifact, [p.place for p in found]))
