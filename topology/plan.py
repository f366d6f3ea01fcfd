"""Which peer feeds which: the chains of a broadcast.

The hub's uplink feeds as many chains as it can at a peer's full rate. The best-scored peers head them and the rest are dealt behind in score
order (ECHO-2, section 4.2 and appendix C.3). Predicted time chooses among plans, the score breaks ties, and a plan that serves stays: a
running one is repaired or replaced only for a gain above `GAMMA`, and by the fewest moves that bring it. Members of poor standing stand behind the others where that costs no time.

Peers of one region may share the way into it, which no rate measured of each of them shows: several at once over that way each get a part, and that looks like their own rate. So a
region is entered once (SparrowRL's relay), also where nothing else is gained, as long as nobody has to wait for that: is served later than before, and by more than `GAMMA` and
`ENTRY_S` later than its own rate allows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum
from statistics import median

from topology.mending import Links, mend, weave
from topology.model import (
    DEFAULT_NETWORK,
    DEFAULT_PEER_BPS,
    TYPICAL_PAYLOAD_BYTES,
    Network,
    Prediction,
    chain_times_s,
    ideal_s,
    member_rates,
    number_of_chains,
    predict_at,
)
from topology.rebuild import GAMMA, cut, demote, gather, grow, level, merge, misplaced, renew, stand_back, straighten, ways_in
from topology.tree import ROOT, Epoch, Member, Plan, by_id

__all__ = ["ROOT", "Member", "Plan", "make_plan", "number_of_chains"]

SMALL = 16
"""Members at most for whom every number of chains is tried."""
ENTRY_S = 0.25
"""Less than this, and a tenth of the time that a payload takes anyway, is not worth sending it once more over a way between regions."""
STAND_BACK = 16
"""Moves behind others that a planning tries because of standings: each takes a prediction of the whole plan."""
LOOKED_AT = 50_000
"""Peers to look at, with all of them looked at for each region that is to be entered once: 50 regions of a fleet of 1000. It is the same ones the next time, else plans would not settle."""


def make_plan(
    members: Iterable[Member],
    uplink_bps: float,
    *,
    epoch: Epoch,
    previous: Plan | None = None,
    payload_bytes: float = TYPICAL_PAYLOAD_BYTES,
    network: Network = DEFAULT_NETWORK,
    anew: bool = True,
    links: Links | None = None,
    most: int | None = None,
) -> Plan:
    """A plan that reaches every member once.

    With a `previous` plan: those gone are cut out, newcomers appended at the shortest chains' tails, and the rest stays as it is, unless that
    predicts a gain above `GAMMA`, or a region is entered more than once and need not be (see above: that needs no gain); when nothing has to change, `previous` itself is returned. Deterministic: the order of `members` does not
    matter, ties go by id. `anew`: whether all may be dealt anew, where no repair brings that gain. `links`: who may feed whom, where not everybody may.
    `most`: the hub is to feed no more, even where that would be no slower.

    Raises PlanError for a member listed twice, an uplink not above 0, or a changed plan whose epoch is not above the previous one's.
    """
    table = by_id(members)
    chains = number_of_chains(uplink_bps, [m.bps for m in table.values()], len(table))
    planner = _Planner(table, member_rates(table), chains, uplink_bps, payload_bytes, network, _ranking(table), links, most)
    if previous is None:
        return planner.fresh(epoch)[0]
    base = planner.keep(previous)
    best, kept = planner.repaired(base)
    if anew and kept.cost_s > GAMMA * planner.floor_s():
        fresh, predicted = planner.fresh(epoch)
        if _improves(predicted, kept):
            best = fresh
    if anew and any(m.standing for m in table.values()):
        best = planner.stood_back(best, base)
    return renew(previous, best, epoch)


def _ranking(table: Mapping[str, Member]) -> Callable[[Member], tuple[bool, int, float, str]]:
    """Sort key: forwarders before leaves, then by standing, then the best score first, the unknown at the median, ties by id."""
    known = [m.score for m in table.values() if m.score is not None]
    middle = median(known) if known else 0.0
    return lambda m: (m.leaf, m.standing, -(middle if m.score is None else m.score), m.id)


def _improves(new: Prediction, old: Prediction) -> bool:
    """By more than the hysteresis, and on one scale, so that plans can never take turns."""
    return new.cost_s * GAMMA < old.cost_s


@dataclass(frozen=True, slots=True)
class _Planner:
    """One planning's inputs."""

    table: Mapping[str, Member]
    rates: Mapping[str, float]
    chains: int
    uplink_bps: float
    payload_bytes: float
    network: Network
    rank: Callable[[Member], tuple[bool, int, float, str]]
    links: Links | None
    most: int | None

    def mended(self, plan: Plan) -> Plan:
        return plan if self.links is None else mend(plan, self.links, self.chains)

    def predict(self, plan: Plan) -> Prediction:
        return predict_at(plan, self.table, self.rates, self.payload_bytes, self.uplink_bps, self.network)

    def floor_s(self) -> float:
        """No plan's `cost_s` is below this: the slowest is never done before its own rate allows."""
        return math.sqrt(ideal_s(self.payload_bytes, min(self.rates.values()))) if self.rates else 0.0

    def fresh(self, epoch: Epoch) -> tuple[Plan, Prediction]:
        """From nothing: dealt round robin, or region by region where that is sooner, or no later and crosses less between them; where there are few, also in any other number of chains, a single
        one and the star among them, if that is sooner by more than noise."""
        best = self._dealt(epoch)
        if len(self.table) <= SMALL:
            for number in range(1, min(len(self.table), self.most or SMALL) + 1):
                other = replace(self, chains=number)._dealt(epoch)
                if _improves(other[1], best[1]):
                    # With the repairs that this planner would make of it the next time, too: a plan that serves stays.
                    best = self.repaired(other[0])
        return best

    def _dealt(self, epoch: Epoch) -> tuple[Plan, Prediction]:
        """Heads, then the rest round robin or region by region, then the leaves at the tails."""
        ranked = sorted(self.table.values(), key=self.rank)
        forwarders = [m for m in ranked if not m.leaf]
        chains = [self._in_regions(forwarders[n :: self.chains]) for n in range(self.chains)]
        if self.chains > 1 and len({m.region for m in forwarders}) > 1:
            chains = min(chains, self._by_region(forwarders), key=self._last_s)
        parent = {m.id: above for chain in chains for m, above in zip(chain, [ROOT, *(m.id for m in chain)], strict=False)}
        dealt = grow(Plan(epoch, parent), [m for m in ranked if m.leaf], self.chains)
        if self.links is None:
            return self.repaired(dealt)
        woven = weave([m.id for m in forwarders], self.links, self.chains)
        around = grow(Plan(epoch, woven), [m for m in ranked if m.id not in woven], self.chains)
        return min((self.repaired(self.mended(plan)) for plan in (dealt, around)), key=lambda found: found[1].cost_s)

    def _by_region(self, forwarders: list[Member]) -> list[list[Member]]:
        """All of one region before the next, cut into chains: so no more is sent from region to region than there are chains and regions."""
        best = {m.region: place for place, m in reversed(list(enumerate(forwarders)))}
        ranked = sorted(forwarders, key=lambda m: best[m.region])
        cuts = [n * len(ranked) // self.chains for n in range(self.chains + 1)]
        return [ranked[a:b] for a, b in pairwise(cuts)]

    def _last_s(self, chains: list[list[Member]]) -> tuple[float, float]:
        """Until the last chain has it; and, of those with that alike, what all hops between regions add."""
        times_s = [max(self._times_s(chain), default=0.0) for chain in chains]
        regions = ((self.network.root_region, *(m.region for m in chain)) for chain in chains)
        return round(max(times_s), 6), fsum(self.network.rtt_s(a, b) for row in regions for a, b in pairwise(row))

    def keep(self, previous: Plan) -> Plan:
        """The previous plan with the fewest changes that today's members ask for."""
        table = self.table
        gone = [p for p in previous.order if p not in table or (table[p].leaf and previous.children(p))]
        kept = cut(previous, gone)
        leaves = frozenset(m.id for m in table.values() if m.leaf and m.id in kept)
        if leaves != kept.leaves:
            kept = kept.changed(kept.epoch, {}, leaves=leaves)
        return self.mended(grow(kept, sorted((m for m in table.values() if m.id not in kept), key=self.rank), self.chains))

    def repaired(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The plan after every repair that is worth its moves, the cheaper kind first; and what is predicted of it."""
        repairs: tuple[Callable[[Plan], Plan], ...] = (
            lambda p: demote(p, self.table, self.rates, self.chains),
            lambda p: straighten(p, self.chains),
            lambda p: level(p, self.chains),
        )
        plan, before = self._entered_once(plan)
        untried = list(repairs)
        while untried:
            candidate = self.mended(untried.pop(0)(plan))
            # Asked before regions are gathered too: that takes time, and few candidates are better.
            if candidate.parent == plan.parent or not _improves(self.predict(candidate), before):
                continue
            candidate, after = self._entered_once(candidate)
            if _improves(after, before):
                plan, before, untried = candidate, after, list(repairs)
        if self.most is not None and (merged := self.mended(merge(plan, self.most))).parent != plan.parent:
            plan, before = merged, self.predict(merged)
        return plan, before

    def stood_back(self, best: Plan, base: Plan) -> Plan:
        """`best`, in which those whose standing asks for it stand behind the others, where that makes nobody wait: no plan that is slower by more than noise than `best`, or than
        one made from nothing. `base`: the plan in force, which stays if no more of them stand in front there and nothing else is gained, so that plans can't take turns."""
        before = self.predict(best)
        wrong = misplaced(best, self.table)
        most_s = GAMMA * min(before.cost_s, self.fresh(best.epoch)[1].cost_s) if wrong else 0.0
        plan = tried = best
        refused: set[str] = set()
        for _ in range(STAND_BACK):
            left = [peer for peer in misplaced(tried, self.table) if peer not in refused]
            if not left:
                break
            candidate = self.mended(stand_back(tried, self.table[left[0]], self._region_of))
            if self.predict(candidate).cost_s > most_s:
                refused.add(left[0])
                continue
            # One behind a head may have to go, too, before there is anything gained.
            tried = candidate
            plan = tried if len(misplaced(tried, self.table)) < len(misplaced(plan, self.table)) else plan
        fewer = len(misplaced(plan, self.table)) < len(misplaced(base, self.table))
        return plan if fewer or plan is best or _improves(self.predict(plan), self.predict(base)) else base

    def _entered_once(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The plan with as few ways into each region as have nobody wait for it, and what is predicted of it. Where the number of chains was told, that stands.

        What a piece takes from hop to hop inside a region is not known: rates are those at which the region is reached. So what hops add is judged at rates that are usual.
        """
        if self.most is not None or not self.table:
            return plan, self.predict(plan)
        middle = median(self.rates.values())
        near = self._near(middle)
        every = self._ways_in(plan)
        waiting = [region for region in every if region in near and len(every[region]) > 1]
        if not waiting:
            return plan, self.predict(plan)
        flowing = replace(self, network=replace(self.network, piece_bytes=0))
        floors_s = {p: GAMMA * ideal_s(self.payload_bytes, min(rate, middle)) + ENTRY_S for p, rate in self.rates.items()}
        before = flowing.predict(plan)
        while waiting:
            region = waiting.pop(0)
            candidate = self.mended(gather(plan, every[region], self._region_of, self.rates))
            ways_left = self._ways_in(candidate)
            if sum(map(len, ways_left.values())) >= sum(map(len, every.values())):
                continue
            after = flowing.predict(candidate)
            if all(time_s <= max(before.times_s[p], floors_s[p]) for p, time_s in after.times_s.items()):
                plan, before, every = candidate, after, ways_left
                # Those refused so far may find a place now, after those that wait: from the first again each time, it took the square of the regions.
                left = [region for region in waiting if len(every[region]) > 1]
                waiting = left + [region for region in every if region in near and len(every[region]) > 1 and region not in left]
        return plan, self.predict(plan)

    def _ways_in(self, plan: Plan) -> dict[str, list[str]]:
        return ways_in(plan, self._region_of, self.network.root_region)

    def _near(self, middle_bps: float) -> set[str]:
        """The regions so small that a chain through each is no wait: of those, as many as there is time for, those with the most peers."""
        room_s = (GAMMA - 1) * ideal_s(self.payload_bytes, middle_bps) + ENTRY_S
        hop_s = self.network.near_rtt_s / 2 + self.network.hop_s
        hop_s += ideal_s(min(self.network.piece_bytes, self.payload_bytes), max(middle_bps, DEFAULT_PEER_BPS))
        sizes = Counter(m.region for m in self.table.values())
        small = [r for r, size in sizes.items() if r not in ("", self.network.root_region) and (size - 1) * hop_s <= room_s]
        return set(sorted(small, key=lambda region: (-sizes[region], region))[: max(1, LOOKED_AT // len(self.table))])

    def _region_of(self, peer: str) -> str:
        return self.table[peer].region

    def _in_regions(self, chain: list[Member]) -> list[Member]:
        """The chain behind the same head, each region in one stretch, where that serves its peers sooner on the whole; else as it came."""
        seen = {m.region: index for index, m in reversed(list(enumerate(chain)))}
        if len(seen) == 1:
            return chain
        return min(chain, sorted(chain, key=lambda m: seen[m.region]), key=self._summed_s)

    def _summed_s(self, chain: list[Member]) -> float:
        return fsum(self._times_s(chain))

    def _times_s(self, chain: list[Member]) -> list[float]:
        regions = [self.network.root_region, *(m.region for m in chain)]
        rtts_s = [self.network.rtt_s(a, b) + 2 * self.network.hop_s for a, b in pairwise(regions)]
        rates = [self.rates[m.id] for m in chain]
        return chain_times_s(self.payload_bytes, rates, self.network.piece_bytes, rtts_s)
