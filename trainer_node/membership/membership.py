"""The run's peers and the plan that they follow: applies the decisions of ``topology`` to live sessions.

Guarantees: epochs only increase, also across restarts. If a peer is lost, only its own children move. A peer that
re-attached by itself keeps its new place if it knew the plan that it left. A plan is replaced only for a lasting gain.
A slow peer is moved, never dropped. No peer is planned below a peer that it is known not to reach
(`topology.reachability`). No I/O; time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.codec.codec_prediction import PEER_CORES, BroadcastPath
from p2pcast.ground.backoff import Backoff
from p2pcast.relay.child_lag import Inflow
from p2pcast.transport.stripe_count import FEWEST
from topology.blame import Blame
from topology.broadcast_time import DEFAULT_PEER_BPS, BroadcastNetwork, median_bps, number_of_chains, predict
from topology.fallback_neighbours import affected_peers
from topology.link_repair import Links, repair_links
from topology.peer_rates import PeerRate, assumed_bps, slowest_bps, update_rates
from topology.plan import make_plan
from topology.plan_changes import admit, adopt, excise, lower, straighten
from topology.plan_tree import ROOT, Epoch, Plan, PlanError, PlanMember
from topology.reachability import Reach
from topology.score import Score, Transfers, reliability, score, speed_cap_bps
from topology.score_demotion import Standing, Standings
from topology.slow_peers import Laggards, Patience, Stragglers
from topology.version_sizes import VersionSizes
from topology.withholding import Withholding
from trainer_node.membership.peer_record import PeerRecord

DEFAULT_UPLINK_BPS = 1e9
LARGE_BYTES = 1 << 30
"""Size in bytes at which only the slowest link determines a broadcast's time, and round trips do not matter."""
REPAIR_S = 2.0
"""Delay between the first two repairs of the plan between broadcasts, in seconds."""
RATED_BYTES = 1 << 20
"""Smaller transfers count for a peer's reliability, but not for its rate."""
MAX_HISTORY = 4096
"""Number of peers to remember after they left; those that have been gone longest are forgotten first."""


class Membership:
    """``incarnation``: how often this hub has started. ``chains``: a fixed number of chains, or None to choose it by
    rule. ``region``: the hub's own label; peers without a label are assumed to share no link. ``cap_bps``: the rate
    that counts as full speed in scores, in bit/s; None for the fastest peer's.
    """

    def __init__(
        self,
        incarnation: int,
        uplink_bps: float,
        chains: int | None = None,
        region: str = "",
        cap_bps: float | None = None,
    ) -> None:
        self._stated_cap_bps = cap_bps
        self._cap_bps: float | None = None
        """Cached; None after a new measurement."""
        self._region = region
        self._incarnation = incarnation
        self._counter = 0
        self._uplink_bps = uplink_bps
        self._chains = chains
        self.peers: dict[str, PeerRecord] = {}
        self.sizes = VersionSizes()
        """Sizes of the run's versions, for which plans are made."""
        self.reach = Reach()
        self.plan = Plan(self._epoch(), {})
        self._sent_plan = self.plan
        self._touched: set[str] | None = set()
        """Peers whose place has changed since ``take_changes`` was last called; None if plans have to be compared."""
        self._history: dict[str, tuple[Transfers, PeerRate]] = {}
        """Measurements of peers that have left, so that a peer that reconnects often keeps them."""
        self._rates: dict[str, PeerRate] = {}
        self._samples: dict[str, tuple[float, float]] = {}
        """Peer → bytes and bit/s of its last transfer, kept until the broadcast is over and all can be compared."""
        self._middle_bps: float | None = None
        """Median of the peers' rates; None after a new measurement."""
        self._began: Plan | None = None
        """The plan in force when the current version began."""
        self._patience = Patience()
        self._laggards = Laggards()
        self._stragglers = Stragglers()
        self._standings = Standings()
        self._fed: dict[str, set[str]] = {}
        """Parent → its children, as the children report."""
        self._suspects: set[str] = set()
        """Peers that a child left by itself and that have not reported since; they get no new children."""
        self._outrun: set[str] = set()
        """Parents whose children fell behind in this broadcast."""
        self._strayed = False
        """Whether a peer has moved by itself since the last planning, so that ``repair`` may move it back."""
        self._repair_at, self._repair_backoff = 0.0, Backoff(REPAIR_S, math.inf, None)
        self.blame = Blame()
        self.withholding = Withholding()

    @property
    def _network(self) -> BroadcastNetwork:
        """A hop carries one piece on each stripe in use. Pieces have the size of the next version's, and the usual
        number of stripes is assumed (`relay.active_stripes`). On slow links two stripes are in use, and hops are
        shorter than assumed.
        """
        piece = piece_bytes(self.sizes.bytes, self.sizes.hops, self.sizes.slowest_bps)
        return BroadcastNetwork(piece_bytes=FEWEST * piece, root_region=self._region)

    @property
    def uplink_bps(self) -> float:
        """The hub's own rate, as stated or measured."""
        return self._uplink_bps

    @uplink_bps.setter
    def uplink_bps(self, bps: float) -> None:
        self._uplink_bps = bps

    @property
    def detached(self) -> frozenset[str]:
        """Peers too slow for the others: each is the last of a chain, feeds no peer, and is not waited for."""
        return self._laggards.detached

    def rate(self, ident: str) -> PeerRate:
        """The rate at which a peer is known to receive and forward."""
        return self._rates.get(ident, PeerRate())

    def join(self, peer: PeerRecord, now: float) -> None:
        """Add a new peer at the tail of a chain. No other peer is moved or examined, so thousands may join at once."""
        if peer.ident in self.plan:
            self.leave(peer.ident, now)
        peer.transfers, rate = self._history.get(peer.ident, (peer.transfers, PeerRate()))
        if rate.bps is not None:
            self._rates[peer.ident] = rate
        self.peers[peer.ident] = peer
        self._fed.setdefault(peer.parent, set()).add(peer.ident)
        self._cap_bps = None
        leaf = peer.ident in self._laggards.detached | self._standings.leaves | self.demoted(now)
        member = PlanMember(peer.ident, peer.region, rate.bps, leaf=leaf)
        if peer.ways:
            self.reach.join(peer.ident, peer.site, peer.ways, peer.families, beside_hub=peer.beside_hub)
        plan = admit(
            self.plan, member, chains=self._number_of_chains(), region_of=self._region_of,
            apart=self._chains is None and peer.region not in ("", self._region), epoch=self._next(),
        )  # fmt: skip
        self._touch(peer.ident)
        self.plan = self._repaired(plan, now)

    def leave(self, ident: str, now: float, *, failed: bool = False) -> None:
        peer = self.peers.pop(ident, None)
        if peer is None:
            return
        if failed:
            peer.transfers = peer.transfers.record(now, 0, 0.0, False)
        self._is_fed(peer, None)
        self._fed.pop(ident, None)
        self._history.pop(ident, None)
        self._history[ident] = (peer.transfers, self._rates.pop(ident, PeerRate()))
        self._cap_bps = None
        if len(self._history) > MAX_HISTORY:
            longest = next(iter(self._history))
            del self._history[longest]
            self._standings.forget(longest)
        self._samples.pop(ident, None)
        self._stragglers.forget(ident)
        self._suspects.discard(ident)
        self.reach.leave(ident)
        self._touch(ident, *self.plan.children(ident))
        self.plan = self._repaired(excise(self.plan, [ident], epoch=self._next()), now)

    def note_parent(self, ident: str, parent: str, epoch: Epoch) -> bool:
        """Handle a peer's report of its parent. Returns whether that made a new plan."""
        peer = self.peers.get(ident)
        if peer is None:
            return False
        self._is_fed(peer, parent)
        # A peer that has not seen its newest plan yet is still moving to its place in it.
        if epoch < peer.sent_epoch or ident not in self.plan or self.plan.parent[ident] == parent:
            return False
        if parent != ROOT and parent not in self.plan:
            return False
        left = self.plan.parent[ident]
        try:
            self.plan = adopt(self.plan, ident, parent, epoch=self._next())
        except PlanError:
            return False
        self._strayed = True
        self._touch(ident, left)
        if left != ROOT and not self.plan.children(left) and left not in self.plan.leaves:
            self._suspects.add(left)
            self.plan = self.plan.changed(self._next(), {}, leaves=self.plan.leaves | {left})
        return True

    def note_report(self, ident: str, now: float) -> None:
        """Handle the fact that a peer has reported, and so is alive."""
        if ident in self._suspects:
            self._suspects.discard(ident)
            if ident in self.plan.leaves and ident not in self._leaves(now):
                self._touch(ident)
                self.plan = self.plan.changed(self._next(), {}, leaves=self.plan.leaves - {ident})

    def _is_fed(self, peer: PeerRecord, parent: str | None) -> None:
        if (others := self._fed.get(peer.parent)) is not None:
            others.discard(peer.ident)
            if not others:
                del self._fed[peer.parent]
        if parent is not None:
            peer.parent = parent
            self._fed.setdefault(parent, set()).add(peer.ident)

    def note_transfer(self, ident: str, now: float, size: int, seconds: float) -> None:
        peer = self.peers.get(ident)
        if peer is not None:
            self._cap_bps = None
            rated = size if size >= RATED_BYTES else 0
            peer.transfers = peer.transfers.record(now, rated, seconds, True)
            if rated and seconds > 0:
                self._samples[ident] = (float(size), 8.0 * size / seconds)

    def begin_version(self) -> None:
        """Called when a version begins."""
        self._repair_at = 0.0
        self._repair_backoff.reset()
        self._stragglers.begin()
        self._outrun.clear()
        self._samples.clear()
        self._began = self.plan
        self.sizes.hops = max(1, self.plan.depth)
        self.sizes.slowest_bps = slowest_bps(self._rates.get(ident, PeerRate()) for ident in self.peers)

    def note_inflow(self, ident: str, now: float, inflow: Inflow) -> bool:
        """Handle a peer's rate during a broadcast. Returns whether that made a new plan: if the peer fell behind its
        parent, it is moved so that its children do not wait for it.
        """
        above = self.plan.parent[ident]
        if self.peers[ident].parent != above:
            return False  # the report is about a different parent
        bps = inflow.bps
        if not self._stragglers.found(self.plan, ident, now, bps, inflow.behind_bytes, self._uplink_bps, inflow.span_s):
            return False
        if above != ROOT and max(len(self._fed.get(above, ())), len(self.plan.children(above))) > 1:
            # The parent feeds two children, as planned or because one has not left yet; each gets a share of its rate.
            straight = straighten(self.plan, self._number_of_chains())
            if straight is self.plan:
                return False
            self._touched = None
            self.plan = self._repaired(straight.under(self._next()), now)
            return True
        if above != ROOT and above in self._outrun:
            # Another child of the same parent was slow too, so the parent is the cause.
            ident = above
        else:
            self._outrun.add(above)
        self._stragglers.forget(ident)
        self._rates[ident] = self.rate(ident).own(bps)
        self._middle_bps = None
        member = PlanMember(ident, self.peers[ident].region, leaf=ident in self._leaves(now))
        self._touch(ident, *self.plan.children(ident))
        self.plan = self._repaired(lower(self.plan, member, region_of=self._region_of, epoch=self._next()), now)
        return True

    def note_garbled(self, witness: str, rows: Collection[tuple[str, int]], now: float) -> list[str]:
        """Handle a peer's counts of corrupt pieces that each peer has sent. Returns the joined peers that are newly
        blamed; they feed no other peer.
        """
        anew = self.blame.record(witness, [row for row in rows if row[0] in self.peers], now)
        self._made_leaves(anew, now)
        return anew

    def note_lacking(self, witness: str, rows: Iterable[tuple[bytes, str | None]], now: float) -> None:
        """Handle a peer's list of sealed artifacts that it does not have, with the parent that withheld each. The
        report counts only against the peer's planned parent.
        """
        above = self.plan.parent[witness] if witness in self.plan else ROOT
        self.withholding.record(
            witness, ((artifact, parent if parent == above else None) for artifact, parent in rows), now
        )

    def judge_withholding(self, now: float) -> list[tuple[str, str]]:
        """Return the peers newly found to withhold versions, each with its witness. Such peers feed no other peer."""
        anew = self.withholding.judge(now, lambda ident: ident in self.peers)
        self._made_leaves([ident for ident, _ in anew], now)
        return anew

    def _made_leaves(self, idents: Iterable[str], now: float) -> None:
        for ident in idents:
            if ident in self.plan and ident not in self.plan.leaves:
                member = PlanMember(ident, self._region_of(ident), leaf=True)
                self._touch(ident, *self.plan.children(ident))
                self.plan = self._repaired(lower(self.plan, member, region_of=self._region_of, epoch=self._next()), now)

    def reach_changed(self, now: float) -> bool:
        """Update the plan after ``reach`` has learnt which peers can dial which. Returns whether the plan changed."""
        plan = self._repaired(self.plan, now)
        return self._follow(plan.under(self._epoch(1)) if plan is not self.plan else plan)

    def replan(self, now: float) -> bool:
        """Between broadcasts: adopt a better plan if it has been better for long enough and the gain is worth the
        moves. Peers that have become hopeless, or have recovered, move at once. Moves that peers made by themselves are
        repaired. Returns whether that made a new plan.
        """
        self._settle()
        strayed, self._strayed = self._strayed, False
        bps = self._bps()
        was = self._laggards.detached | self._standings.leaves
        self._laggards.update(bps)
        self._standings.update({ident: reliability(peer.transfers) for ident, peer in self.peers.items()})
        plan = self._made(now)
        if not self._patience.wanted(plan is not self.plan):
            if not strayed and was == self._laggards.detached | self._standings.leaves:
                return False
            plan = self._made(now, anew=False)
        return self._follow(plan)

    def repair(self, now: float) -> bool:
        """Between broadcasts: undo the moves that peers made by themselves, and those that the plan made because of
        failed dial attempts that have since expired. Each repair doubles the delay before the next one, until a version
        begins: a peer that cannot reach its parent would otherwise be sent there forever. Returns whether that made a
        new plan.
        """
        self._strayed |= self.reach.forgot(now)
        if not self._strayed or now < self._repair_at:
            return False
        self._repair_at = now + self._repair_backoff.next_s()
        self._strayed = False
        return self._follow(self._made(now, anew=False))

    def _made(self, now: float, *, anew: bool = True) -> Plan:
        """``anew``: plan from scratch, instead of only repairing the plan."""
        return make_plan(
            self._members(now),
            self._uplink(),
            epoch=self._epoch(1),
            previous=self.plan,
            payload_bytes=self.sizes.bytes,
            network=self._network,
            anew=anew,
            links=self._links(now),
            most=self._chains,
        )

    def _links(self, now: float) -> Links | None:
        """The possible links between peers; None if every pair of peers can be linked."""
        return None if self.reach.plain else lambda above, below: self.reach.links(above, below, now)

    def _repaired(self, plan: Plan, now: float) -> Plan:
        """Return ``plan`` without unreachable links, with its epoch unchanged."""
        links = self._links(now)
        repaired = plan if links is None else repair_links(plan, links, self._number_of_chains())
        if repaired is not plan:
            self._touched = None
        return repaired

    def take_changes(self) -> tuple[dict[str, str], set[str]]:
        """Return what changed since the last call: the peers with a new parent, and the peers whose place, ancestors or
        neighbours may have changed.
        """
        before, after, touched = self._sent_plan, self.plan, self._touched
        self._sent_plan, self._touched = after, set()
        if before is after:
            return {}, set()
        if touched is None:
            touched = {peer for peer, _ in before.parent.items() ^ after.parent.items()} | (
                before.leaves ^ after.leaves
            )
        places = {peer: after.parent[peer] for peer in sorted(touched) if peer in after}
        moved = {peer: above for peer, above in places.items() if before.parent.get(peer) != above}
        return moved, affected_peers(before, after, touched)

    def _touch(self, *idents: str) -> None:
        if self._touched is not None:
            self._touched.update(idents)

    def _follow(self, plan: Plan) -> bool:
        """Adopt ``plan``. Returns whether it differs from the current one."""
        if plan is self.plan:
            return False
        self._counter += 1
        self._touched = None
        self.plan = plan
        return True

    def way(self, now: float, cores: int) -> BroadcastPath:
        """The path of a large payload to the last peer, by the plan and by measurements. ``cores``: this machine's.

        A peer that has not reported its cores is assumed to have PEER_CORES, and so is an empty fleet. Detached peers
        are not waited for.
        """
        self._settle()
        members = self._members(now)
        once, twice = (self._last_s(members, n * LARGE_BYTES) for n in (1, 2))
        link_bps = 8 * LARGE_BYTES / (twice - once) if twice > once else DEFAULT_PEER_BPS
        return BroadcastPath(link_bps, cores, min((peer.cores for peer in self.peers.values()), default=PEER_CORES))

    def _last_s(self, members: list[PlanMember], payload_bytes: float) -> float:
        times_s = predict(self.plan, members, payload_bytes, self._uplink_bps, self._network).times_s
        return max((s for ident, s in times_s.items() if ident not in self._laggards.detached), default=0.0)

    def score(self, ident: str, now: float) -> Score | None:
        return score(self.peers[ident].transfers, now, self.speed_cap_bps)

    def standing(self, ident: str) -> Standing:
        """How far a peer may feed others."""
        return self._standings.of(ident)

    @property
    def speed_cap_bps(self) -> float:
        """The rate that counts as full speed in scores."""
        if self._cap_bps is None:
            self._cap_bps = speed_cap_bps((peer.transfers.bps for peer in self.peers.values()), self._stated_cap_bps)
        return self._cap_bps

    def _members(self, now: float) -> list[PlanMember]:
        bps, leaves = self._bps(), self._leaves(now)
        return [self._member(p, bps[p.ident], p.ident in leaves, now) for p in self.peers.values()]

    def _leaves(self, now: float) -> AbstractSet[str]:
        """All peers that must feed no other peer."""
        return self._laggards.detached | self._standings.leaves | self._suspects | self.demoted(now)

    def demoted(self, now: float) -> frozenset[str]:
        """Peers that must feed no other peer because of other peers' reports."""
        return self.blame.demoted(now) | self.withholding.demoted(now)

    def _member(self, peer: PeerRecord, bps: float | None, leaf: bool, now: float) -> PlanMember:
        rated = self.score(peer.ident, now)
        return PlanMember(
            peer.ident, peer.region, bps, None if rated is None else rated.total, leaf, self._standings.of(peer.ident)
        )

    def _bps(self) -> dict[str, float | None]:
        return assumed_bps({ident: self._rates.get(ident, PeerRate()) for ident in self.peers}, self.plan.depth)

    def _settle(self) -> None:
        """Attribute slowness in the last broadcast to the peer where it began."""
        if self._samples:
            self._rates |= update_rates(
                self.plan, self._began or self.plan, self._rates, self._samples, self._uplink_bps
            )
            self._samples.clear()
            self._middle_bps = None

    def _middle(self) -> float:
        if self._middle_bps is None:
            self._middle_bps = median_bps(self._bps().values())
        return self._middle_bps

    def _uplink(self) -> float:
        return self._uplink_bps if self._chains is None else (self._chains + 0.5) * median_bps(self._bps().values())

    def _number_of_chains(self) -> int:
        return self._chains or number_of_chains(self._uplink_bps, [self._middle()], len(self.peers))

    def _region_of(self, ident: str) -> str:
        peer = self.peers.get(ident)
        return "" if peer is None else peer.region

    def _epoch(self, ahead: int = 0) -> Epoch:
        return (self._incarnation, self._counter + ahead)

    def _next(self) -> Epoch:
        self._counter += 1
        return self._epoch()
