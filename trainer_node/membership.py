"""Who takes part, and which plan they follow: topology's decisions applied to live sessions.

Promises: epochs only grow, across restarts too; a peer that dies moves only its orphans; one that re-attached by itself is believed if it
knew the plan it left; a plan is replaced only for a gain that lasts, and whoever is slow is moved, never dropped; nobody is planned below a peer that it can't
be linked to, as far as is known (`topology.reach`). No I/O, time is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.codec.choice import PEER_CORES, Way
from p2pcast.relay.lag import Inflow
from p2pcast.transport.striping import FEWEST
from topology.blame import Blame
from topology.laggards import Laggards, Patience, Stragglers
from topology.mending import Links, mend
from topology.model import DEFAULT_PEER_BPS, Network, median_bps, number_of_chains, predict
from topology.plan import make_plan
from topology.rates import Rate, assumed_bps, settle
from topology.reach import Reach
from topology.rebuild import admit, adopt, excise, lower, straighten
from topology.score import Score, Transfers, reliability, score, speed_cap_bps
from topology.sideways import concerned
from topology.sizes import Sizes
from topology.standing import Standing, Standings
from topology.tree import ROOT, Epoch, Member, Plan, PlanError
from topology.withholding import Withholding
from trainer_node.peer import Peer

DEFAULT_UPLINK_BPS = 1e9
LARGE_BYTES = 1 << 30
"""So much that a broadcast's time is its narrowest link's, and round trips do not count."""
REPAIR_S = 2.0
"""From the first repair of the plan between two broadcasts to the second."""
RATED_BYTES = 1 << 20
"""Transfers below this say whether a peer works, but nothing about its rate."""
MAX_HISTORY = 4096
"""Peers that are gone and still remembered; the longest gone are forgotten first."""


class Membership:
    """``incarnation``: how often this hub has started. ``chains``: a fixed number of chains, or None for the rule. ``region``: the hub's own;
    of those that name none, hub or peers, nothing is taken to share a way. ``cap_bps``: the rate that is full speed in scores, or None for the fastest peer's."""

    def __init__(
        self, incarnation: int, uplink_bps: float, chains: int | None = None, region: str = "", cap_bps: float | None = None
    ) -> None:
        self._stated_cap_bps = cap_bps
        self._cap_bps: float | None = None
        """While nothing new has been measured."""
        self._region = region
        self._incarnation = incarnation
        self._counter = 0
        self._uplink_bps = uplink_bps
        self._chains = chains
        self.peers: dict[str, Peer] = {}
        self.sizes = Sizes()
        """Of the run's versions: what plans are made for."""
        self.reach = Reach()
        self.plan = Plan(self._epoch(), {})
        self._told = self.plan
        self._touched: set[str] | None = set()
        """Who has another place since ``news`` was last asked for; None: whoever has, by comparison."""
        self._history: dict[str, tuple[Transfers, Rate]] = {}
        """What was measured of peers that are gone: a peer that flaps does not start anew."""
        self._rates: dict[str, Rate] = {}
        self._samples: dict[str, tuple[float, float]] = {}
        """(bytes, bits/s) of each peer's last transfer, until all of that broadcast can be compared."""
        self._middle_bps: float | None = None
        """Their median, while nothing new has been settled."""
        self._began: Plan | None = None
        """The plan in force when the version under way began."""
        self._patience = Patience()
        self._laggards = Laggards()
        self._stragglers = Stragglers()
        self._standings = Standings()
        self._fed: dict[str, set[str]] = {}
        """Parent → whom it feeds, as they say themselves."""
        self._suspects: set[str] = set()
        """Peers that a child has left by itself, and of which nothing has been heard since: the plan has nobody new fed by them."""
        self._outrun: set[str] = set()
        """Parents in this broadcast behind whom somebody fell."""
        self._strayed = False
        """Somebody has moved by itself since the last planning: what that spoilt is repaired at the next, or before that by ``repair``."""
        self._repair_at, self._repair_wait_s = 0.0, REPAIR_S
        self.blame = Blame()
        self.withholding = Withholding()

    @property
    def _network(self) -> Network:
        """A hop takes a piece on each stripe in use, which share its rate: as large as they are for the size that plans are made for, on as many stripes as carry
        pieces as a rule (`relay.lanes`). On narrow ways those are two, and hops are shorter than is taken here."""
        return Network(piece_bytes=FEWEST * piece_bytes(self.sizes.bytes), root_region=self._region)

    @property
    def uplink_bps(self) -> float:
        """The hub's own rate, as stated or measured."""
        return self._uplink_bps

    @uplink_bps.setter
    def uplink_bps(self, bps: float) -> None:
        self._uplink_bps = bps

    @property
    def detached(self) -> frozenset[str]:
        """Those too slow for the others: fed at a tail, feeding nobody, and not waited for."""
        return self._laggards.detached

    def rate(self, ident: str) -> Rate:
        """What a peer is known to take in and pass on."""
        return self._rates.get(ident, Rate())

    def join(self, peer: Peer, now: float) -> None:
        """A newcomer goes to a tail; nobody else moves. Nobody else is looked at either, so that thousands may join at once."""
        if peer.ident in self.plan:
            self.leave(peer.ident, now)
        peer.transfers, rate = self._history.get(peer.ident, (peer.transfers, Rate()))
        if rate.bps is not None:
            self._rates[peer.ident] = rate
        self.peers[peer.ident] = peer
        self._fed.setdefault(peer.parent, set()).add(peer.ident)
        self._cap_bps = None
        leaf = peer.ident in self._laggards.detached | self._standings.leaves | self.muted(now)
        member = Member(peer.ident, peer.region, rate.bps, leaf=leaf)
        if peer.ways:
            self.reach.join(peer.ident, peer.site, peer.ways, peer.families, beside_hub=peer.beside_hub)
        plan = admit(
            self.plan, member, chains=self._number_of_chains(), region_of=self._region_of,
            apart=self._chains is None and peer.region not in ("", self._region), epoch=self._next(),
        )  # fmt: skip
        self._touch(peer.ident)
        self.plan = self._mended(plan, now)

    def leave(self, ident: str, now: float, *, failed: bool = False) -> None:
        peer = self.peers.pop(ident, None)
        if peer is None:
            return
        if failed:
            peer.transfers = peer.transfers.record(now, 0, 0.0, False)
        self._is_fed(peer, None)
        self._fed.pop(ident, None)
        self._history.pop(ident, None)
        self._history[ident] = (peer.transfers, self._rates.pop(ident, Rate()))
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
        self.plan = self._mended(excise(self.plan, [ident], epoch=self._next()), now)

    def moved(self, ident: str, parent: str, epoch: Epoch) -> bool:
        """A peer says whom it is attached to. True when that made a new plan."""
        peer = self.peers.get(ident)
        if peer is None:
            return False
        self._is_fed(peer, parent)
        # One that has not seen the plan made for it yet is still on its way there.
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

    def heard(self, ident: str, now: float) -> None:
        """A report has come, whatever it says."""
        if ident in self._suspects:
            self._suspects.discard(ident)
            if ident in self.plan.leaves and ident not in self._leaves(now):
                self._touch(ident)
                self.plan = self.plan.changed(self._next(), {}, leaves=self.plan.leaves - {ident})

    def _is_fed(self, peer: Peer, parent: str | None) -> None:
        if (others := self._fed.get(peer.parent)) is not None:
            others.discard(peer.ident)
            if not others:
                del self._fed[peer.parent]
        if parent is not None:
            peer.parent = parent
            self._fed.setdefault(parent, set()).add(peer.ident)

    def transferred(self, ident: str, now: float, size: int, seconds: float) -> None:
        peer = self.peers.get(ident)
        if peer is not None:
            self._cap_bps = None
            rated = size if size >= RATED_BYTES else 0
            peer.transfers = peer.transfers.record(now, rated, seconds, True)
            if rated and seconds > 0:
                self._samples[ident] = (float(size), 8.0 * size / seconds)

    def began(self) -> None:
        """A version begins."""
        self._repair_at, self._repair_wait_s = 0.0, REPAIR_S
        self._stragglers.begin()
        self._outrun.clear()
        self._samples.clear()
        self._began = self.plan

    def progressed(self, ident: str, now: float, inflow: Inflow) -> bool:
        """A peer says how it receives in mid-broadcast. True when that made a new plan: it fell behind its parent, and is out of the way of those that it fed."""
        above = self.plan.parent[ident]
        if self.peers[ident].parent != above:
            return False  # what it says is of another parent
        bps = inflow.bps
        if not self._stragglers.found(self.plan, ident, now, bps, inflow.behind_bytes, self._uplink_bps, inflow.span_s):
            return False
        if above != ROOT and max(len(self._fed.get(above, ())), len(self.plan.children(above))) > 1:
            # Its parent feeds two, by the plan or because one has not left yet, and each gets a part: that is no fault of theirs.
            straight = straighten(self.plan, self._number_of_chains())
            if straight is self.plan:
                return False
            self._touched = None
            self.plan = self._mended(straight.under(self._next()), now)
            return True
        if above != ROOT and above in self._outrun:
            # Nor is it if another one got no more from there: what is slow is above them.
            ident = above
        else:
            self._outrun.add(above)
        self._stragglers.forget(ident)
        self._rates[ident] = self.rate(ident).own(bps)
        self._middle_bps = None
        member = Member(ident, self.peers[ident].region, leaf=ident in self._leaves(now))
        self._touch(ident, *self.plan.children(ident))
        self.plan = self._mended(lower(self.plan, member, region_of=self._region_of, epoch=self._next()), now)
        return True

    def blamed(self, witness: str, rows: Collection[tuple[str, int]], now: float) -> list[str]:
        """A peer says who has sent it how many pieces that did not match. Those whom it blames anew and who are here: they feed nobody any more."""
        anew = [ident for ident in self.blame.heard(witness, rows, now) if ident in self.peers]
        self._made_leaves(anew, now)
        return anew

    def lacks(self, witness: str, rows: Iterable[tuple[bytes, str | None]], now: float) -> None:
        """A peer says what it lacks of what is sealed, and who should have brought it. Its word counts against its parent by the plan alone."""
        above = self.plan.parent[witness] if witness in self.plan else ROOT
        self.withholding.heard(witness, ((artifact, parent if parent == above else None) for artifact, parent in rows), now)

    def withheld(self, now: float) -> list[tuple[str, str]]:
        """Those that turn out to withhold versions, each with its witness: they feed nobody any more."""
        anew = self.withholding.judge(now, lambda ident: ident in self.peers)
        self._made_leaves([ident for ident, _ in anew], now)
        return anew

    def _made_leaves(self, idents: Iterable[str], now: float) -> None:
        for ident in idents:
            if ident in self.plan and ident not in self.plan.leaves:
                member = Member(ident, self._region_of(ident), leaf=True)
                self._touch(ident, *self.plan.children(ident))
                self.plan = self._mended(lower(self.plan, member, region_of=self._region_of, epoch=self._next()), now)

    def looked(self, now: float) -> bool:
        """Something has been learnt of who can dial whom (`reach`). True when that made a new plan."""
        plan = self._mended(self.plan, now)
        return self._follow(plan.under(self._epoch(1)) if plan is not self.plan else plan)

    def replan(self, now: float) -> bool:
        """Between broadcasts: a better plan, if it has been better for long enough and the gain is worth the moves. Who has turned out hopeless,
        or has recovered, finds its place at once: that took as long; and what peers that moved by themselves have spoilt is repaired."""
        self._settle()
        strayed, self._strayed = self._strayed, False
        bps = self._bps()
        was = self._laggards.detached | self._standings.leaves
        self._laggards.look(bps)
        self._standings.look({ident: reliability(peer.transfers) for ident, peer in self.peers.items()})
        plan = self._made(now)
        if not self._patience.wanted(plan is not self.plan):
            if not strayed and was == self._laggards.detached | self._standings.leaves:
                return False
            plan = self._made(now, anew=False)
        return self._follow(plan)

    def repair(self, now: float) -> bool:
        """While no version is on its way: what peers that moved by themselves have spoilt, without waiting for the next broadcast. From one to the next it
        takes twice as long, until a version begins: who cannot reach its parent would else be sent there for ever."""
        if not self._strayed or now < self._repair_at:
            return False
        self._repair_at, self._repair_wait_s = now + self._repair_wait_s, 2 * self._repair_wait_s
        self._strayed = False
        return self._follow(self._made(now, anew=False))

    def _made(self, now: float, *, anew: bool = True) -> Plan:
        """``anew``: not by repairs alone."""
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
        """None where everybody can be linked to everybody."""
        return None if self.reach.plain else lambda above, below: self.reach.links(above, below, now)

    def _mended(self, plan: Plan, now: float) -> Plan:
        """Under its own epoch."""
        links = self._links(now)
        mended = plan if links is None else mend(plan, links, self._number_of_chains())
        if mended is not plan:
            self._touched = None
        return mended

    def news(self) -> tuple[dict[str, str], set[str]]:
        """Since this was last asked: who has come to another parent, and who may have to be told something new of its place, its
        ancestors or its neighbours."""
        before, after, touched = self._told, self.plan, self._touched
        self._told, self._touched = after, set()
        if before is after:
            return {}, set()
        if touched is None:
            touched = {peer for peer, _ in before.parent.items() ^ after.parent.items()} | (before.leaves ^ after.leaves)
        places = {peer: after.parent[peer] for peer in sorted(touched) if peer in after}
        moved = {peer: above for peer, above in places.items() if before.parent.get(peer) != above}
        return moved, concerned(before, after, touched)

    def _touch(self, *idents: str) -> None:
        if self._touched is not None:
            self._touched.update(idents)

    def _follow(self, plan: Plan) -> bool:
        """Whether it is another one."""
        if plan is self.plan:
            return False
        self._counter += 1
        self._touched = None
        self.plan = plan
        return True

    def way(self, now: float, cores: int) -> Way:
        """What a large payload meets on its way to the last peer, by the plan and what has been measured. ``cores``: of this machine.

        A peer that has not said how many cores it decodes with is taken for an ordinary one; so is a fleet of nobody. The detached are not waited
        for.
        """
        self._settle()
        members = self._members(now)
        once, twice = (self._last_s(members, n * LARGE_BYTES) for n in (1, 2))
        link_bps = 8 * LARGE_BYTES / (twice - once) if twice > once else DEFAULT_PEER_BPS
        return Way(link_bps, cores, min((peer.cores for peer in self.peers.values()), default=PEER_CORES))

    def _last_s(self, members: list[Member], payload_bytes: float) -> float:
        times_s = predict(self.plan, members, payload_bytes, self._uplink_bps, self._network).times_s
        return max((s for ident, s in times_s.items() if ident not in self._laggards.detached), default=0.0)

    def score(self, ident: str, now: float) -> Score | None:
        return score(self.peers[ident].transfers, now, self.speed_cap_bps)

    def standing(self, ident: str) -> Standing:
        """How far a peer is trusted with others."""
        return self._standings.of(ident)

    @property
    def speed_cap_bps(self) -> float:
        """The rate that is full speed in scores."""
        if self._cap_bps is None:
            self._cap_bps = speed_cap_bps((peer.transfers.bps for peer in self.peers.values()), self._stated_cap_bps)
        return self._cap_bps

    def _members(self, now: float) -> list[Member]:
        bps, leaves = self._bps(), self._leaves(now)
        return [self._member(p, bps[p.ident], p.ident in leaves, now) for p in self.peers.values()]

    def _leaves(self, now: float) -> AbstractSet[str]:
        """Who is to feed nobody, for whatever reason."""
        return self._laggards.detached | self._standings.leaves | self._suspects | self.muted(now)

    def muted(self, now: float) -> frozenset[str]:
        """Peers that are to feed no other peer, by what others report of them."""
        return self.blame.muted(now) | self.withholding.muted(now)

    def _member(self, peer: Peer, bps: float | None, leaf: bool, now: float) -> Member:
        rated = self.score(peer.ident, now)
        return Member(peer.ident, peer.region, bps, None if rated is None else rated.total, leaf, self._standings.of(peer.ident))

    def _bps(self) -> dict[str, float | None]:
        return assumed_bps({ident: self._rates.get(ident, Rate()) for ident in self.peers}, self.plan.depth)

    def _settle(self) -> None:
        """Charge the last broadcast's slowness to where it began."""
        if self._samples:
            self._rates |= settle(self.plan, self._began or self.plan, self._rates, self._samples, self._uplink_bps)
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
