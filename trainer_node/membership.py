"""Who takes part, and which plan they follow: topology's decisions applied to live sessions.

Promises: epochs only grow, across restarts too; a peer that dies moves only its orphans; one that re-attached by itself is believed if it
knew the plan it left. No I/O, time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2pcast.codec.choice import PEER_CORES, Way
from p2pcast.version import Version
from topology.model import DEFAULT_PEER_BPS, median_bps, time_to_last_s
from topology.plan import make_plan
from topology.rebuild import admit, adopt, excise
from topology.score import Score, Transfers, score
from topology.tree import ROOT, Epoch, Member, Plan, PlanError
from trainer_node.engines import EngineRow

DEFAULT_UPLINK_BPS = 1e9
LARGE_BYTES = 1 << 30
"""So much that a broadcast's time is its narrowest link's, and round trips do not count."""
MAX_CORES = 1 << 16
RATED_BYTES = 1 << 20
"""Transfers below this say whether a peer works, but nothing about its rate."""


MAX_HISTORY = 4096
"""Peers that are gone and still remembered; the longest gone are forgotten first."""


@dataclass(slots=True)
class Peer:
    """A peer as the hub knows it. ``ident``: its node in hex, the planner's id."""

    ident: str
    name: str
    region: str
    host: str
    port: int
    joined_at: float
    transfers: Transfers = field(default_factory=Transfers)
    staged: Version | None = None
    committed: Version | None = None
    parent: str = ROOT
    report: dict[str, Any] = field(default_factory=dict)
    engines: list[EngineRow] = field(default_factory=list)
    """As it last reported them."""
    sent_epoch: Epoch = (0, 0)
    """The newest plan that said something new to it."""

    @property
    def place(self) -> tuple[bytes, str, int]:
        """Its node and address."""
        return bytes.fromhex(self.ident), self.host, self.port


class Membership:
    """``incarnation``: how often this hub has started. ``chains``: a fixed number of chains, or None for the rule."""

    def __init__(self, incarnation: int, uplink_bps: float, chains: int | None = None) -> None:
        self._incarnation = incarnation
        self._counter = 0
        self._uplink_bps = uplink_bps
        self._chains = chains
        self.peers: dict[str, Peer] = {}
        self.plan = Plan(self._epoch(), {})
        self._history: dict[str, Transfers] = {}
        """What was measured of peers that are gone: a peer that flaps does not start anew."""

    def join(self, peer: Peer, now: float) -> None:
        """A newcomer goes to a tail; nobody else moves."""
        if peer.ident in self.plan:
            self.leave(peer.ident, now)
        peer.transfers = self._history.get(peer.ident, peer.transfers)
        self.peers[peer.ident] = peer
        self.plan = admit(self.plan, self._member(peer, now), self._members(now), uplink_bps=self._uplink(), epoch=self._next())

    def leave(self, ident: str, now: float, *, failed: bool = False) -> None:
        peer = self.peers.pop(ident, None)
        if peer is None:
            return
        if failed:
            peer.transfers = peer.transfers.record(now, 0, 0.0, False)
        self._history.pop(ident, None)
        self._history[ident] = peer.transfers
        if len(self._history) > MAX_HISTORY:
            del self._history[next(iter(self._history))]
        self.plan = excise(self.plan, [ident], epoch=self._next())

    def moved(self, ident: str, parent: str, epoch: Epoch) -> bool:
        """A peer says whom it is attached to. True when that made a new plan."""
        peer = self.peers.get(ident)
        if peer is None:
            return False
        peer.parent = parent
        # One that has not seen the plan made for it yet is still on its way there.
        if epoch < peer.sent_epoch or ident not in self.plan or self.plan.parent[ident] == parent:
            return False
        if parent != ROOT and parent not in self.plan:
            return False
        try:
            self.plan = adopt(self.plan, ident, parent, epoch=self._next())
        except PlanError:
            return False
        return True

    def transferred(self, ident: str, now: float, size: int, seconds: float) -> None:
        peer = self.peers.get(ident)
        if peer is not None:
            rated = size if size >= RATED_BYTES else 0
            peer.transfers = peer.transfers.record(now, rated, seconds, True)

    def replan(self, now: float) -> bool:
        """Between broadcasts: a better plan, if the gain is worth the moves."""
        plan = make_plan(self._members(now), self._uplink(), epoch=self._epoch(1), previous=self.plan)
        if plan is self.plan:
            return False
        self._counter += 1
        self.plan = plan
        return True

    def way(self, now: float, cores: int) -> Way:
        """What a large payload meets on its way to the last peer, by the plan and what has been measured. ``cores``: of this machine.

        A peer that has not said how many cores it decodes with is taken for an ordinary one; so is a fleet of nobody.
        """
        members = self._members(now)
        once, twice = (time_to_last_s(self.plan, members, n * LARGE_BYTES, self._uplink_bps) for n in (1, 2))
        link_bps = 8 * LARGE_BYTES / (twice - once) if members else DEFAULT_PEER_BPS
        return Way(link_bps, cores, min((_cores(peer) for peer in self.peers.values()), default=PEER_CORES))

    def score(self, ident: str, now: float) -> Score | None:
        return score(self.peers[ident].transfers, now)

    def _member(self, peer: Peer, now: float) -> Member:
        rated = score(peer.transfers, now)
        return Member(peer.ident, peer.region, peer.transfers.bps, None if rated is None else rated.total)

    def _members(self, now: float) -> list[Member]:
        return [self._member(p, now) for p in self.peers.values()]

    def _uplink(self) -> float:
        if self._chains is None:
            return self._uplink_bps
        return (self._chains + 0.5) * median_bps(p.transfers.bps for p in self.peers.values())

    def _epoch(self, ahead: int = 0) -> Epoch:
        return (self._incarnation, self._counter + ahead)

    def _next(self) -> Epoch:
        self._counter += 1
        return self._epoch()


def _cores(peer: Peer) -> int:
    said = peer.report.get("cores")
    return said if type(said) is int and 1 <= said <= MAX_CORES else PEER_CORES
