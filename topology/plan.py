"""The planner: arranges peers in chains and so decides which peer feeds which.

The hub's uplink feeds as many chains as it can at a peer's full rate. The best-scored peers head the chains; the others
follow in score order, dealt round robin (ECHO-2, section 4.2 and appendix C.3). Plans are compared by predicted time,
and the score breaks ties. The plan in force changes only for a predicted gain above `GAMMA`, and by as few moves as
that gain takes. Members of poor standing go behind the others if that costs no time.

The peers of a region may share the path into it. Measured rates do not show that: if several peers use the path at
once, each gets a part of it, and the part looks like the peer's own rate. So a plan enters a region only once
(SparrowRL's relay), even if nothing else is gained, unless that delays a peer. A peer counts as delayed if it is served
later than before, and later than its own rate allows by more than `GAMMA` and `ENTRY_S`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum
from statistics import median

from topology.broadcast_time import (
    DEFAULT_NETWORK,
    DEFAULT_PEER_BPS,
    TYPICAL_PAYLOAD_BYTES,
    BroadcastNetwork,
    Prediction,
    chain_times_s,
    ideal_s,
    member_rates,
    number_of_chains,
    predict_at,
)
from topology.link_repair import Links, deal_linkable, repair_links
from topology.plan_changes import (
    GAMMA,
    cut,
    demote,
    gather,
    grow,
    level,
    merge,
    misplaced,
    move_to_tail,
    renew,
    straighten,
    ways_after,
    ways_in,
)
from topology.plan_tree import ROOT, Epoch, Plan, PlanMember, by_id

__all__ = ["ROOT", "Plan", "PlanMember", "make_plan", "number_of_chains"]

SMALL = 16
"""Most members for which the planner tries every number of chains."""
ENTRY_S = 0.25
"""Delay in seconds, on top of a tenth of the payload's time, that does not justify a second transfer into a region."""
DEMOTION_TRIES = 16
"""Most moves that one planning tries because of standings: each needs a prediction of the whole plan."""
MAX_EXAMINED = 50_000
"""Limit on peers examined so that regions are entered once. Each region takes a pass over all peers, so a fleet of 1000
allows 50 regions. The choice of regions is the same each time, so that plans converge.
"""


def make_plan(
    members: Iterable[PlanMember],
    uplink_bps: float,
    *,
    epoch: Epoch,
    previous: Plan | None = None,
    payload_bytes: float = TYPICAL_PAYLOAD_BYTES,
    network: BroadcastNetwork = DEFAULT_NETWORK,
    anew: bool = True,
    links: Links | None = None,
    most: int | None = None,
) -> Plan:
    """Return a plan that reaches every member once (ECHO-2, section 4.2, appendix C.3; SparrowRL's relay).

    With a `previous` plan, departed members are removed and newcomers are appended to the tails of the shortest chains.
    The rest changes only for a predicted gain above `GAMMA`, if a region is entered more often than necessary, or for
    standings (see the module). Returns `previous` itself if nothing changes. Deterministic: the order of `members` does
    not matter, and ids break ties.

    `uplink_bps`: the hub's upload rate in bits/s. `payload_bytes`: typical size of a version. `anew`: whether the plan
    may be rebuilt from scratch if repairs do not bring the gain, and changed for standings. `links`: which peer may
    feed which; None if every peer may feed every other. `most`: the most peers that the hub may feed, at any cost in
    time.

    Raises PlanError if a member is listed twice, the uplink is not above 0, or the plan changes without a higher epoch.
    """
    table = by_id(members)
    chains = number_of_chains(uplink_bps, [m.bps for m in table.values()], len(table))
    rates = member_rates(table)
    middle_bps = median(rates.values()) if rates else DEFAULT_PEER_BPS
    planner = _Planner(
        table, rates, chains, uplink_bps, payload_bytes, network, _ranking(table), links, most, middle_bps
    )
    if previous is None:
        return planner.fresh(epoch)[0]
    base = planner.keep(previous)
    best, kept = planner.repaired(base)
    if anew and kept.cost_s > GAMMA * planner.floor_s():
        fresh, predicted = planner.fresh(epoch)
        if _improves(predicted, kept):
            best = fresh
    if anew and any(m.standing for m in table.values()):
        best = planner.with_demotions(best, base)
    return renew(previous, best, epoch)


def _ranking(table: Mapping[str, PlanMember]) -> Callable[[PlanMember], tuple[bool, int, float, str]]:
    """Return a sort key: forwarders before leaves, then by standing, then the best score first (unknown scores count as
    the median), then by id.
    """
    known = [m.score for m in table.values() if m.score is not None]
    middle = median(known) if known else 0.0
    return lambda m: (m.leaf, m.standing, -(middle if m.score is None else m.score), m.id)


def _improves(new: Prediction, old: Prediction) -> bool:
    """Whether `new` is better by more than the hysteresis. Plans have one common scale, so they cannot alternate."""
    return new.cost_s * GAMMA < old.cost_s


@dataclass(frozen=True, slots=True)
class _Planner:
    """The inputs of one planning."""

    table: Mapping[str, PlanMember]
    rates: Mapping[str, float]
    chains: int
    uplink_bps: float
    payload_bytes: float
    network: BroadcastNetwork
    rank: Callable[[PlanMember], tuple[bool, int, float, str]]
    links: Links | None
    most: int | None
    middle_bps: float
    """The median of ``rates``."""
    last: list[tuple[Plan, Prediction]] = field(init=False, default_factory=list)
    """The plan predicted last, and its prediction."""

    def link_repaired(self, plan: Plan) -> Plan:
        return plan if self.links is None else repair_links(plan, self.links, self.chains)

    def predict(self, plan: Plan) -> Prediction:
        """Return a plan's prediction, derived from the last one if that plan has the same number of peers."""
        before = self.last[0] if self.last and len(self.last[0][0]) == len(plan) else None
        if before is not None and before[0].parent is plan.parent:
            return before[1]
        found = predict_at(
            plan, self.table, self.rates, self.payload_bytes, self.uplink_bps, self.network, before, self.middle_bps
        )
        self.last[:] = [(plan, found)]
        return found

    def floor_s(self) -> float:
        """Return a lower bound of any plan's `cost_s`: the slowest peer is limited by its own rate."""
        return math.sqrt(ideal_s(self.payload_bytes, min(self.rates.values()))) if self.rates else 0.0

    def fresh(self, epoch: Epoch) -> tuple[Plan, Prediction]:
        """Return a plan made from scratch, and its prediction. It is dealt round robin, or region by region if that is
        faster, or as fast with less delay between regions. With few members, every number of chains from one to the
        star is tried too, and taken if it is better by more than `GAMMA`.
        """
        best = self._dealt(epoch)
        if len(self.table) <= SMALL:
            for number in range(1, min(len(self.table), self.most or SMALL) + 1):
                other = replace(self, chains=number)._dealt(epoch)
                if _improves(other[1], best[1]):
                    # Repair it as the next planning would, so that the next planning keeps it.
                    best = self.repaired(other[0])
        return best

    def _dealt(self, epoch: Epoch) -> tuple[Plan, Prediction]:
        """Deal the heads first, then the others round robin or region by region, then the leaves to the tails."""
        ranked = sorted(self.table.values(), key=self.rank)
        forwarders = [m for m in ranked if not m.leaf]
        chains = [self._in_regions(forwarders[n :: self.chains]) for n in range(self.chains)]
        if self.chains > 1 and len({m.region for m in forwarders}) > 1:
            chains = min(chains, self._by_region(forwarders), key=self._last_s)
        parent = {
            m.id: above for chain in chains for m, above in zip(chain, [ROOT, *(m.id for m in chain)], strict=False)
        }
        dealt = grow(Plan(epoch, parent), [m for m in ranked if m.leaf], self.chains)
        if self.links is None:
            return self.repaired(dealt)
        woven = deal_linkable([m.id for m in forwarders], self.links, self.chains)
        around = grow(Plan(epoch, woven), [m for m in ranked if m.id not in woven], self.chains)
        return min(
            (self.repaired(self.link_repaired(plan)) for plan in (dealt, around)), key=lambda found: found[1].cost_s
        )

    def _by_region(self, forwarders: list[PlanMember]) -> list[list[PlanMember]]:
        """Return chains that are cut from one sequence of all members, region after region. So there are at most as
        many crossings between regions as chains and regions together.
        """
        best = {m.region: place for place, m in reversed(list(enumerate(forwarders)))}
        ranked = sorted(forwarders, key=lambda m: best[m.region])
        cuts = [n * len(ranked) // self.chains for n in range(self.chains + 1)]
        return [ranked[a:b] for a, b in pairwise(cuts)]

    def _last_s(self, chains: list[list[PlanMember]]) -> tuple[float, float]:
        """Return the seconds until the last chain is done and, to break ties, the sum of all hops' round-trip times."""
        times_s = [max(self._times_s(chain), default=0.0) for chain in chains]
        regions = ((self.network.root_region, *(m.region for m in chain)) for chain in chains)
        return round(max(times_s), 6), fsum(self.network.rtt_s(a, b) for row in regions for a, b in pairwise(row))

    def keep(self, previous: Plan) -> Plan:
        """Return the previous plan with the fewest changes that the current members require."""
        table = self.table
        gone = [p for p in previous.order if p not in table or (table[p].leaf and previous.children(p))]
        kept = cut(previous, gone)
        leaves = frozenset(m.id for m in table.values() if m.leaf and m.id in kept)
        if leaves != kept.leaves:
            kept = kept.changed(kept.epoch, {}, leaves=leaves)
        return self.link_repaired(
            grow(kept, sorted((m for m in table.values() if m.id not in kept), key=self.rank), self.chains)
        )

    def repaired(self, plan: Plan) -> tuple[Plan, Prediction]:
        """Return the plan after every worthwhile repair, the cheaper kinds first, and its prediction."""
        repairs: tuple[Callable[[Plan], Plan], ...] = (
            lambda p: demote(p, self.table, self.rates, self.chains),
            lambda p: straighten(p, self.chains),
            lambda p: level(p, self.chains),
        )
        plan, before = self._entered_once(plan)
        untried = list(repairs)
        while untried:
            candidate = self.link_repaired(untried.pop(0)(plan))
            # Check this before gathering regions, which is slow: few candidates are better.
            if candidate.parent == plan.parent or not _improves(self.predict(candidate), before):
                continue
            candidate, after = self._entered_once(candidate)
            if _improves(after, before):
                plan, before, untried = candidate, after, list(repairs)
        if self.most is not None and (merged := self.link_repaired(merge(plan, self.most))).parent != plan.parent:
            plan, before = merged, self.predict(merged)
        return plan, before

    def with_demotions(self, best: Plan, base: Plan) -> Plan:
        """Return `best` with members of poor standing moved behind the others, as far as the cost allows. The result's
        cost is at most `GAMMA` times that of `best` and of a plan made from scratch. `base`: the plan in force. It is
        returned if it has no more misplaced members and nothing else is gained, so that plans cannot alternate.
        """
        before = self.predict(best)
        wrong = misplaced(best, self.table)
        most_s = GAMMA * min(before.cost_s, self.fresh(best.epoch)[1].cost_s) if wrong else 0.0
        plan = tried = best
        refused: set[str] = set()
        for _ in range(DEMOTION_TRIES):
            left = [peer for peer in misplaced(tried, self.table) if peer not in refused]
            if not left:
                break
            candidate = self.link_repaired(move_to_tail(tried, self.table[left[0]], self._region_of))
            if self.predict(candidate).cost_s > most_s:
                refused.add(left[0])
                continue
            # Keep a move that gains nothing: the gain may need a second move, that of the peer behind a head.
            tried = candidate
            plan = tried if len(misplaced(tried, self.table)) < len(misplaced(plan, self.table)) else plan
        fewer = len(misplaced(plan, self.table)) < len(misplaced(base, self.table))
        return plan if fewer or plan is best or _improves(self.predict(plan), self.predict(base)) else base

    def _entered_once(self, plan: Plan) -> tuple[Plan, Prediction]:
        """Return the plan with as few entries into each region as possible without delaying a peer, and its prediction.
        If the number of chains is fixed (`most`), the plan does not change.

        Rates inside a region are unknown: measured rates are those at which data enters the region. So the delay of
        hops is computed with typical rates.
        """
        if self.most is not None or not self.table:
            return plan, self.predict(plan)
        middle = self.middle_bps
        near = self._near(middle)
        every = ways_in(plan, self._region_of, self.network.root_region)
        waiting = [region for region in every if region in near and len(every[region]) > 1]
        if not waiting:
            return plan, self.predict(plan)
        flowing = replace(self, network=replace(self.network, piece_bytes=0))
        floors_s = {
            p: GAMMA * ideal_s(self.payload_bytes, min(rate, middle)) + ENTRY_S for p, rate in self.rates.items()
        }
        before = flowing.predict(plan)
        while waiting:
            region = waiting.pop(0)
            candidate = self.link_repaired(gather(plan, every[region], self._region_of, self.rates))
            ways_left = ways_after(every, plan, candidate, self._region_of, self.network.root_region)
            if sum(map(len, ways_left.values())) >= sum(map(len, every.values())):
                continue
            after = flowing.predict(candidate)
            if all(
                time_s <= floors_s[p] or time_s <= before.times_s[p]
                for p, time_s in after.times_s.items()
                if time_s != before.times_s[p]
            ):
                plan, before, every = candidate, after, ways_left
                # Regions rejected before may work now, so queue them again. Restarting at the first region each time
                # would take quadratic time.
                left = [region for region in waiting if len(every[region]) > 1]
                waiting = left + [
                    region for region in every if region in near and len(every[region]) > 1 and region not in left
                ]
        return plan, self.predict(plan)

    def _near(self, middle_bps: float) -> set[str]:
        """Return the regions that are so small that a chain through them delays no peer: the largest of these, as many
        as MAX_EXAMINED allows.
        """
        room_s = (GAMMA - 1) * ideal_s(self.payload_bytes, middle_bps) + ENTRY_S
        hop_s = self.network.near_rtt_s / 2 + self.network.hop_s
        hop_s += ideal_s(min(self.network.piece_bytes, self.payload_bytes), max(middle_bps, DEFAULT_PEER_BPS))
        sizes = Counter(m.region for m in self.table.values())
        small = [
            r for r, size in sizes.items() if r not in ("", self.network.root_region) and (size - 1) * hop_s <= room_s
        ]
        return set(
            sorted(small, key=lambda region: (-sizes[region], region))[: max(1, MAX_EXAMINED // len(self.table))]
        )

    def _region_of(self, peer: str) -> str:
        return self.table[peer].region

    def _in_regions(self, chain: list[PlanMember]) -> list[PlanMember]:
        """Return the chain with the members of each region next to each other, behind the same head, if that lowers the
        sum of its peers' times; otherwise the chain unchanged.
        """
        seen = {m.region: index for index, m in reversed(list(enumerate(chain)))}
        if len(seen) == 1:
            return chain
        return min(chain, sorted(chain, key=lambda m: seen[m.region]), key=self._summed_s)

    def _summed_s(self, chain: list[PlanMember]) -> float:
        return fsum(self._times_s(chain))

    def _times_s(self, chain: list[PlanMember]) -> list[float]:
        regions = [self.network.root_region, *(m.region for m in chain)]
        rtts_s = [self.network.rtt_s(a, b) + 2 * self.network.hop_s for a, b in pairwise(regions)]
        rates = [self.rates[m.id] for m in chain]
        return chain_times_s(self.payload_bytes, rates, self.network.piece_bytes, rtts_s)
