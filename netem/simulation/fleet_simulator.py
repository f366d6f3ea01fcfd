"""A fleet of thousands of peers in one thread: peers that join, die and slow down, and the hub's own decisions about
them.

The decisions are those of the real code: `trainer_node.membership.membership` and
`trainer_node.membership.broadcast_progress` with their timing, peers' silence limits from `p2pcast.relay.parent_watch`,
the hub's from `trainer_node.hub`. The rest is modelled: the flow of payloads (`topology.flow_model`), the arrival of
reports and orders, and the duration of a re-attachment. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from p2pcast.ground.version import Version
from p2pcast.relay.child_lag import ChildLag, Inflow
from p2pcast.relay.tuning import IDLE_SILENCE_S, SILENCE_FLOOR_S
from topology.broadcast_time import BroadcastNetwork, ideal_s
from topology.flow_model import FlowModel
from topology.plan_changes import moves
from topology.plan_tree import ROOT, Epoch
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord

REPORT_S = 1.0
"""Interval between a peer's reports."""
TICK_S = 0.1
"""Reports within this interval are processed together."""
HUB_SILENCE_S = 5.0
"""As `trainer_node.hub.SILENCE_S`."""
DIAL_RTTS = 3.0
"""TCP, and the two exchanges of the handshake."""
ATTACH_RTTS = 0.5
"""The list of held pieces goes to the new parent; the first piece's way back is counted with the hops."""
HEAD_START_S = 0.3
"""As `rollout_node.sync.parent_failover.HEAD_START_S`: for a parent that does not answer."""


@dataclass(frozen=True, slots=True)
class FleetEvents:
    """Events of the simulated fleet. Shares are of all peers, a minute."""

    peers: int = 1000
    regions: int = 5
    versions: int = 20
    payload_bytes: float = 64 << 20
    uplink_bps: float = 3e9
    peer_bps: float = 100e6
    interval_s: float = 15.0
    """Interval between the beginnings of two versions."""
    deaths: float = 0.01
    """As many peers join."""
    silent: float = 0.5
    """Share of deaths without closed connections: a machine that is cut off. The kernel closes the connections of a
    process that ends.
    """
    slowdowns: float = 0.0025
    slow_s: float = 60.0
    """Mean length of a slow-down to between 0.1 and 0.6 of the peer's rate."""
    network: BroadcastNetwork = field(default_factory=lambda: BroadcastNetwork(root_region="region-0"))


@dataclass(slots=True)
class VersionResult:
    """Seconds from the beginning of a version, over peers that were present then and are alive."""

    ideal_s: float
    t99_s: float = math.inf
    last_s: float = math.inf
    unfinished: int = 0
    """Peers that were incomplete when the next version began; they receive both versions."""
    deaths: int = 0
    joins: int = 0
    slowdowns: int = 0
    moved: int = 0
    """Re-attachments between the beginnings of this version and the next."""

    @property
    def document(self) -> dict[str, Any]:
        return {
            "ideal_s": self.ideal_s,
            "t99_s": _finite(self.t99_s),
            "last_s": _finite(self.last_s),
            "t99_over_ideal": _finite(self.t99_s / self.ideal_s),
            "last_over_ideal": _finite(self.last_s / self.ideal_s),
            "unfinished": self.unfinished,
            "deaths": self.deaths,
            "joins": self.joins,
            "slowdowns": self.slowdowns,
            "moved": self.moved,
        }


Tell = Callable[[float, str, dict[str, Any]], object]
"""Gets the time in seconds, the kind and the facts of an event, as the hub would emit it."""


def simulate(scenario: FleetEvents, seed: int = 0, tell: Tell | None = None) -> list[VersionResult]:
    """One run, with a result a version. The first two versions are the start of the fleet, before any rate is
    measured. ``tell`` changes nothing of the run.
    """
    return SimulatedFleet(scenario, Random(seed), tell=tell).run()


class SimulatedFleet:
    """`run` simulates a scenario; `netem.simulation.broadcast_replay` simulates one version of a given tree."""

    def __init__(self, scenario: FleetEvents, rng: Random, chains: int | None = None, tell: Tell | None = None) -> None:
        self.scenario = scenario
        self.rng = rng
        self.now = 0.0
        self._tell = tell
        self.membership = Membership(1, scenario.uplink_bps, chains, scenario.network.root_region)
        self.broadcast = BroadcastProgress()
        self.regions: dict[str, str] = {}
        self.flow = FlowModel(scenario.payload_bytes, scenario.uplink_bps, self.regions, scenario.network)
        self.results: list[VersionResult] = []
        self._serial = 0
        self._created = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._dead: set[str] = set()
        """Peers that the hub does not know yet."""
        self._slow: set[str] = set()
        self._there: set[str] = set()
        """Peers present at the beginning of the current version."""
        self._done_s: dict[str, float] = {}
        self._staged: dict[str, Version | None] = {}
        self._lag: dict[str, ChildLag] = {}
        self._version = Version(0, 0)
        self._began_s = 0.0
        self._known: dict[str, Epoch] = {}
        """The newest order that has reached each peer."""
        self._going: dict[str, str] = {}
        """Peers that are dialling a new parent."""

    def run(self) -> list[VersionResult]:
        scenario = self.scenario
        for _ in range(scenario.peers):
            self._join()
        for number in range(scenario.versions):
            self._at(5.0 + number * scenario.interval_s, self._begin)
        for rate, event in (
            (scenario.deaths, self._die),
            (scenario.deaths, self._add_peer),
            (scenario.slowdowns, self._slow_down),
        ):
            self._poisson(scenario.peers * rate / 60.0, event)
        self._at(TICK_S, self._tick)
        end_s = 5.0 + scenario.versions * scenario.interval_s
        while self._agenda and self._agenda[0][0] <= end_s:
            self._until(self._agenda[0][0])
            heapq.heappop(self._agenda)[2]()
        self._until(end_s)
        self._close()
        return self.results

    def _event(self, kind: str, **facts: Any) -> None:
        if self._tell is not None:
            self._tell(self.now, kind, facts)

    # -- time

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._agenda, (when_s, self._serial, event))

    def _poisson(self, per_s: float, event: Callable[[], None]) -> None:
        if per_s <= 0:
            return

        def again() -> None:
            event()
            self._at(self.now + self.rng.expovariate(per_s), again)

        self._at(5.0 + self.rng.expovariate(per_s), again)

    def _until(self, when_s: float) -> None:
        while self.now < when_s:
            self.now, finished = self.flow.advance(when_s)
            for peer in finished:
                self._finished(peer)

    # -- peers

    def _join(self) -> None:
        peer = self._new_record(f"{self.rng.getrandbits(64):016x}")
        self._event("joined", peer=peer.name, region=peer.region, staged=None)
        self._ordered(lambda: self.membership.join(peer, self.now))

    def _new_record(self, peer: str) -> PeerRecord:
        self._created += 1
        self.regions[peer] = f"region-{self._created % self.scenario.regions}"
        self.flow.add(peer, self.scenario.peer_bps, 0.0 if self.results else self.scenario.payload_bytes)
        self._lag[peer] = ChildLag()
        self._lag[peer].begin(self.now, 0)
        self._staged[peer] = None
        return PeerRecord(peer, peer, self.regions[peer], "", 0, self.now)

    def _add_peer(self) -> None:
        self._join()
        self._result().joins += 1

    def _alive(self) -> list[str]:
        return [p for p in self.membership.peers if p not in self._dead]

    def _die(self) -> None:
        alive = self._alive()
        if not alive:
            return
        self._result().deaths += 1
        self._kill(self.rng.choice(alive), noticed=self.rng.random() >= self.scenario.silent)

    def _kill(self, peer: str, *, noticed: bool) -> None:
        self._dead.add(peer)
        self._going.pop(peer, None)
        for orphan in self.flow.remove(peer):
            rtt_s = self._rtt_s(orphan, peer)
            limit_s = max(4 * rtt_s, SILENCE_FLOOR_S) if not self.flow.done(orphan) else IDLE_SILENCE_S
            self._at(self.now + (rtt_s / 2 if noticed else limit_s), lambda o=orphan: self._orphaned(o))  # type: ignore[misc]
        self._at(
            self.now + (self._rtt_s(peer, ROOT) / 2 if noticed else HUB_SILENCE_S), lambda: self._lost(peer, noticed)
        )

    def _lost(self, peer: str, noticed: bool) -> None:
        """The hub drops a peer whose control connection was silent for too long, unless the peer has returned
        meanwhile.
        """
        if peer not in self._dead:
            return
        self._dead.discard(peer)
        self._there.discard(peer)
        self._staged.pop(peer, None)
        self._event("left", peer=peer, lost=True, why="its connection ended" if noticed else "it was silent")
        self._ordered(lambda: self.membership.leave(peer, self.now, failed=True))

    def _orphaned(self, peer: str) -> None:
        """A peer whose parent is silent turns to the first of its backups that answers."""
        if not self._present(peer) or self.flow.parent(peer) is not None or peer in self._going:
            return
        plan = self.membership.plan
        for candidate in (plan.parent[peer], *plan.backups(peer)):
            if candidate == ROOT or (self._present(candidate) and not self.flow.feeds(peer, candidate)):
                self._move(peer, candidate)
                return

    def _present(self, peer: str) -> bool:
        return peer in self.membership.peers and peer not in self._dead

    def _slow_down(self) -> None:
        fast = [p for p in self._alive() if p not in self._slow]
        if not fast:
            return
        peer = self.rng.choice(fast)
        self._result().slowdowns += 1
        self._slow.add(peer)
        self.flow.limit(peer, self.scenario.peer_bps * self.rng.uniform(0.1, 0.6))
        self._at(self.now + self.rng.expovariate(1.0 / self.scenario.slow_s), lambda: self._recover(peer))

    def _recover(self, peer: str) -> None:
        self._slow.discard(peer)
        if self._present(peer):
            self.flow.limit(peer, self.scenario.peer_bps)

    # -- links

    def _rtt_s(self, a: str, b: str) -> float:
        root = self.scenario.network.root_region
        return self.scenario.network.rtt_s(self.regions.get(a, root), self.regions.get(b, root))

    def _ordered(self, decide: Callable[[], object]) -> None:
        """A decision of the hub, followed by its orders to the affected peers."""
        before = self.membership.plan
        decide()
        plan = self.membership.plan
        if plan is before:
            return
        moved = moves(before, plan)
        if moved:
            self._event("plan", epoch=list(plan.epoch), moved=[[p, a if a != ROOT else "hub"] for p, a in moved])
        for peer, parent in moved:
            member = self.membership.peers[peer]
            member.sent_epoch = plan.epoch
            arrival_s = self.now + self._rtt_s(peer, ROOT) / 2
            self._at(arrival_s, lambda p=peer, a=parent, e=plan.epoch: self._follow_order(p, a, e))  # type: ignore[misc]

    def _follow_order(self, peer: str, parent: str, epoch: Epoch) -> None:
        if not self._present(peer):
            return
        self._known[peer] = epoch
        if self.membership.plan.parent[peer] != parent:
            return  # a newer order has arrived
        if self.flow.parent(peer) == parent and peer not in self._going:
            return
        self._move(peer, parent)

    def _move(self, peer: str, parent: str) -> None:
        """Dial a new parent. The old one feeds the peer until then, unless it lags; then other peers at the new place
        feed it.
        """
        self._going[peer] = parent
        if self._lag[peer].lags:
            self.flow.detach(peer)
        if self.results:
            self._result().moved += 1
        self._at(self.now + DIAL_RTTS * self._rtt_s(peer, parent), lambda: self._dialled(peer, parent))

    def _dialled(self, peer: str, parent: str) -> None:
        if self._going.get(peer) != parent:
            return
        if not self._present(peer):
            del self._going[peer]
        elif parent != ROOT and not self._present(parent):
            self._at(self.now + HEAD_START_S, lambda: self._unanswered(peer, parent))
        else:
            self.flow.detach(peer)
            self._at(self.now + ATTACH_RTTS * self._rtt_s(peer, parent), lambda: self._arrive(peer, parent))

    def _unanswered(self, peer: str, parent: str) -> None:
        """The peer keeps its place and reports the failure. Without a parent it turns to its backups."""
        if self._going.get(peer) == parent:
            del self._going[peer]
            if self.flow.parent(peer) is None:
                self._orphaned(peer)
            elif self._present(peer):
                self._reports_place(peer)

    def _reports_place(self, peer: str) -> None:
        parent, epoch = self.flow.parent(peer), self._known.get(peer, (0, 0))
        assert parent is not None
        self._at(
            self.now + self._rtt_s(peer, ROOT) / 2,
            lambda: self._ordered(lambda: self.membership.note_parent(peer, parent, epoch)),
        )

    def _arrive(self, peer: str, parent: str) -> None:
        if self._going.get(peer) != parent:
            return
        del self._going[peer]
        if not self._present(peer):
            return
        if parent != ROOT and (not self._present(parent) or self.flow.feeds(peer, parent)):
            self._at(self.now + SILENCE_FLOOR_S, lambda: self._orphaned(peer))
            return
        self.flow.attach(peer, parent)
        self._lag[peer].begin(self.now, int(self.flow.got_bytes(peer)))
        self._reports_place(peer)

    # -- versions

    def _result(self) -> VersionResult:
        if not self.results:
            self.results.append(VersionResult(self._ideal_s()))
        return self.results[-1]

    def _ideal_s(self) -> float:
        return ideal_s(self.scenario.payload_bytes, self.scenario.peer_bps)

    def _begin(self) -> None:
        self._close()
        self._version = Version(0, self._version.step + 1)
        self.results.append(VersionResult(self._ideal_s()))
        self.flow.restart()
        for peer in self._alive():
            self._lag[peer].begin(self.now, int(self.flow.got_bytes(peer)))
        for peer in self._alive():
            if self.flow.parent(peer) is None and peer not in self._going:
                # The announcement of a version makes peers watch their parents as closely as during a transfer.
                self._listen(peer)
        self._began_s, self._done_s = self.now, {}
        self._event("opened", version=str(self._version))
        self._event("sealed", version=str(self._version), bytes=round(self.scenario.payload_bytes))
        self._there = set(self._alive())
        self.membership.sizes.published(int(self.scenario.payload_bytes))
        self.membership.begin_version()
        self.broadcast.begin(self._version, self._there, self.now)

    def _listen(self, peer: str) -> None:
        limit_s = max(4 * self._rtt_s(peer, self.membership.plan.parent[peer]), SILENCE_FLOOR_S)
        self._at(self.now + self._rtt_s(peer, ROOT) / 2 + limit_s, lambda: self._orphaned(peer))

    def _close(self) -> None:
        """Record the result of the current version."""
        if self._version.step == 0:
            return
        result = self._result()
        present = [p for p in self._there if self._present(p)]
        times = sorted(self._done_s.get(p, math.inf) for p in present)
        if times:
            result.t99_s = times[math.ceil(0.99 * len(times)) - 1]
            result.last_s = times[-1]
            result.unfinished = sum(math.isinf(t) for t in times)

    def _finished(self, peer: str) -> None:
        version, flow_s, hops_s = self._version, self.now - self._began_s, self.flow.hops_s(peer)
        self._at(self.now + hops_s, lambda: self._completed(peer, version, flow_s, flow_s + hops_s))

    def _completed(self, peer: str, version: Version, flow_s: float, took_s: float) -> None:
        """`flow_s`: seconds from the first announcement here to the last byte."""
        if version == self._version and self._present(peer):
            self._done_s[peer] = took_s
            self._staged[peer] = version
            self._event("staged", peer=peer, version=str(version), after_s=round(took_s, 4))
            self.membership.note_transfer(peer, self.now, int(self.scenario.payload_bytes), flow_s)

    def _note_inflow(self, peer: str, inflow: Inflow) -> None:
        if self._present(peer) and peer in self.broadcast.awaited:
            self._ordered(lambda: self.membership.note_inflow(peer, self.now, inflow))

    def _tick(self) -> None:
        """Process reports, and check whether all peers have the version."""
        count = round(REPORT_S / TICK_S)
        turn = round(self.now / TICK_S) % count
        if self.broadcast.awaited:
            for peer in self._alive():
                if int(peer[:8], 16) % count == turn:
                    self.membership.note_report(peer, self.now)
                if self.flow.parent(peer) is None or self.flow.done(peer):
                    continue
                lag = self._lag[peer]
                urgent = lag.sample(self.now, int(self.flow.got_bytes(peer)), max(0, int(self.flow.behind_bytes(peer))))
                if (urgent or int(peer[:8], 16) % count == turn) and lag.inflow is not None:
                    self._at(self.now + self._rtt_s(peer, ROOT) / 2, partial(self._note_inflow, peer, lag.inflow))
        detached = self.membership.detached
        staged = {p: v for p, v in self._staged.items() if p not in detached}
        if self.broadcast.settled(staged, self.now):
            self._ordered(lambda: self.membership.replan(self.now))
        self._at(self.now + TICK_S, self._tick)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
