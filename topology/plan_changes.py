"""Changes to a plan with the fewest moves.

Guarantees: peers are removed, added and moved one link at a time. `excise` moves only the orphans of dead peers,
`admit` moves no peer, and `adopt` records a move that a peer has already made. Each returns the given plan if nothing
changes, otherwise one under the new epoch, which must be above the old one. `demote`, `straighten`, `level`, `gather`,
`merge` and `move_to_tail` are the planner's repairs: proposals under the old epoch. All are deterministic.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from topology.broadcast_time import median_bps
from topology.plan_tree import MAX_CHILDREN, ROOT, Epoch, LoopError, ParentFullError, Plan, PlanError, PlanMember, by_id

GAMMA: Final = 1.1
"""Hysteresis: a gain below this factor counts as noise. ECHO-2 (section 4.3): 10 % absorbs short-term fluctuation."""

FAR_HOPS: Final = 6
"""Number of hops inside a region that take as long as one hop between two regions, given the default piece size, rates
and round-trip times of `topology.broadcast_time`.
"""


def excise(plan: Plan, dead: Iterable[str], *, epoch: Epoch) -> Plan:
    """Remove dead peers. Each of their children moves to its nearest live ancestor that may feed one more peer, or else
    to ROOT. Ids that are not in the plan are ignored.
    """
    return renew(plan, cut(plan, dead), epoch)


def adopt(plan: Plan, peer: str, new_parent: str, *, epoch: Epoch) -> Plan:
    """Record that `peer`, with its subtree, is now below `new_parent` (which may be ROOT).

    Raises LoopError if the new parent is below the peer, and ParentFullError if it is a leaf of this plan or may not
    feed one more. Raises PlanError if either is not in the plan.
    """
    if peer not in plan:
        raise PlanError(f"peer {peer!r} is not in the plan: admit it first")
    if new_parent != ROOT and new_parent not in plan:
        raise PlanError(f"peer {peer!r} names {new_parent!r} as its parent, which is not in the plan")
    if plan.parent[peer] == new_parent:
        return plan
    if peer in plan.path(new_parent):
        raise LoopError(f"peer {peer!r} cannot hang below {new_parent!r}, which it feeds itself")
    if new_parent != ROOT and (new_parent in plan.leaves or len(plan.children(new_parent)) >= MAX_CHILDREN):
        raise ParentFullError(f"peer {peer!r} cannot hang below {new_parent!r}, which feeds as many as it may")
    return renew(plan, plan.changed(plan.epoch, {peer: new_parent}), epoch)


def admit(
    plan: Plan,
    member: PlanMember,
    *,
    chains: int,
    turned: Iterable[str] = (),
    region_of: Callable[[str], str] = lambda _: "",
    apart: bool = False,
    epoch: Epoch,
) -> Plan:
    """Append a new peer to the tail of the shortest chain, or as a new head while there are fewer than `chains`.

    A tail in the newcomer's region is preferred if its chain is at most `FAR_HOPS` longer than the shortest. With
    `apart`, a tail at a depth of at most `FAR_HOPS` is also preferred to a new chain. `turned`: members that have
    become leaves since the plan was made; those without children get none. Apart from copies, takes time proportional
    to the number of chains. Raises PlanError if the newcomer is already in the plan.
    """
    if member.id in plan:
        raise PlanError(f"peer {member.id!r} is in the plan already: excise it before it comes back")
    fresh = {p for p in turned if p in plan and p not in plan.leaves and not plan.children(p)}
    known = plan.changed(plan.epoch, {}, leaves=plan.leaves | fresh) if fresh else plan
    return renew(plan, _appended(known, member, chains, region_of, apart=apart), epoch)


def _appended(
    plan: Plan, member: PlanMember, chains: int, region_of: Callable[[str], str], *, apart: bool = False
) -> Plan:
    full = len(plan.children(ROOT)) >= chains
    near = _near(plan, member.region, region_of, None if full else 0) if full or apart else None
    if near is None:
        return grow(plan, [member], chains)
    leaves = plan.leaves | {member.id} if member.leaf else None
    return plan.changed(plan.epoch, {member.id: near}, leaves=leaves)


def _near(plan: Plan, region: str, region_of: Callable[[str], str], elsewhere: int | None) -> str | None:
    """Return the highest tail in the region, or None if a place elsewhere is higher by more than `FAR_HOPS`.
    `elsewhere`: the depth of that place; None stands for the highest tail's depth.
    """
    for depth, peer in plan.tails:
        if depth > (plan.tails[0][0] if elsewhere is None else elsewhere) + FAR_HOPS:
            break
        if region_of(peer) == region:
            return peer
    return None


def lower(plan: Plan, member: PlanMember, *, region_of: Callable[[str], str] = lambda _: "", epoch: Epoch) -> Plan:
    """Move a peer to a tail, so that it no longer delays the peers below it. It becomes a leaf if `member` is one. The
    tail is chosen as in `admit`; the peer's children move as in `excise`.
    """
    return renew(plan, move_to_tail(plan, member, region_of), epoch)


def misplaced(plan: Plan, members: Mapping[str, PlanMember]) -> list[str]:
    """Return the members that are above a member of better standing, although their own standing excludes that place
    (`topology.score_demotion`), the best standing first.
    """
    best: dict[str, int] = {}  # of the peer and all below it
    found: list[PlanMember] = []
    for peer in reversed(plan.order):
        member = members[peer]
        best[peer] = min(
            (min(best[child], members[child].standing) for child in plan.children(peer)), default=member.standing
        )
        if best[peer] < member.standing and (member.standing > 1 or plan.parent[peer] == ROOT):
            found.append(member)
    return [m.id for m in sorted(found, key=lambda m: (m.standing, m.id))]


def move_to_tail(plan: Plan, member: PlanMember, region_of: Callable[[str], str]) -> Plan:
    """Propose to move a member to a tail, chosen as in `admit`. The member's children move as in `excise`."""
    return _appended(cut(plan, [member.id]), member, 0, region_of)


def moves(old: Plan, new: Plan) -> list[tuple[str, str]]:
    """Return (peer, new parent) for every new peer and every peer whose parent has changed, parents before children."""
    return [(peer, new.parent[peer]) for peer in new.order if old.parent.get(peer) != new.parent[peer]]


def validate(plan: Plan, members: Iterable[PlanMember]) -> None:
    """Raise PlanError unless the plan reaches exactly the members and no leaf forwards (`Plan` checks more)."""
    table = by_id(members)
    if missing := table.keys() - plan.parent.keys():
        raise PlanError(f"{len(missing)} live peers are not reached, {min(missing)!r} first")
    if strangers := plan.parent.keys() - table.keys():
        raise PlanError(f"{len(strangers)} peers of the plan are not members, {min(strangers)!r} first")
    if loaded := [m.id for m in table.values() if m.leaf and plan.children(m.id)]:
        raise PlanError(f"{loaded[0]!r} is a leaf and yet feeds {plan.children(loaded[0])[0]!r}")


def renew(old: Plan, changed: Plan, epoch: Epoch) -> Plan:
    """Return `old` itself if `changed` equals it, otherwise `changed` under the new epoch. Raises PlanError if the new
    epoch is needed and is not above the old one.
    """
    if changed is old or (changed.parent == old.parent and changed.leaves == old.leaves):
        return old
    if epoch <= old.epoch:
        raise PlanError(f"a changed plan needs an epoch above {old.epoch}, not {epoch}")
    return changed.under(epoch)


def cut(plan: Plan, dead: Iterable[str]) -> Plan:
    """`excise` under the old epoch."""
    gone = {peer for peer in dead if peer in plan}
    if not gone:
        return plan
    kept = {peer: len(plan.children(peer)) for peer in (*gone, *(plan.parent[p] for p in gone))}
    load = {peer: count - sum(child in gone for child in plan.children(peer)) for peer, count in kept.items()}
    put: dict[str, str] = {}
    for peer in sorted(gone, key=lambda p: (plan.depth_of(p), p)):
        for orphan in plan.children(peer):
            if orphan in gone:
                continue
            above = plan.parent[peer]
            while above != ROOT and (
                above in gone or load.setdefault(above, len(plan.children(above))) >= MAX_CHILDREN
            ):
                above = plan.parent[above]
            put[orphan] = above
            load[above] = load.get(above, 0) + 1
    return plan.changed(plan.epoch, put, gone, plan.leaves - gone if plan.leaves & gone else None)


def grow(plan: Plan, newcomers: Sequence[PlanMember], chains: int) -> Plan:
    """Append the newcomers in the given order under the old epoch, without moving any other peer."""
    if not newcomers:
        return plan
    slots = _Slots(plan, chains)
    put = {member.id: slots.take(member.id, member.leaf) for member in newcomers}
    leaves = {m.id for m in newcomers if m.leaf}
    return plan.changed(plan.epoch, put, leaves=plan.leaves | leaves if leaves else None)


class _Slots:
    """Places for newcomers that need no other peer to move. In order of preference: a new chain, the tail of the
    shortest chain, a place as a second child (if all chains end in leaves), and the hub.
    """

    def __init__(self, plan: Plan, chains: int) -> None:
        self._plan = plan
        self._heads_left = chains - len(plan.children(ROOT))
        self._tails = list(plan.tails)  # ascending, and so a heap
        self._placed: dict[str, tuple[int, bool]] = {}
        """Each newcomer placed so far → its depth, and whether it is a leaf."""
        self._only: dict[str, str] = {}
        """Former tails → the newcomer below them."""
        self._seconds: list[tuple[int, int, str]] | None = None
        """Places as a second child. Computed when first needed: they rarely are, and it takes a pass over all peers."""

    def take(self, peer: str, leaf: bool) -> str:
        """Place one peer and return its parent. Takes O(log n)."""
        parent = ROOT
        if self._heads_left > 0:
            self._heads_left -= 1
        elif self._tails:
            parent = heapq.heappop(self._tails)[1]
            self._only[parent] = peer
            if self._seconds is not None:
                heapq.heappush(self._seconds, self._second(parent, leaf))
        else:
            if self._seconds is None:
                self._seconds = self._all_seconds()
            if self._seconds:
                parent = heapq.heappop(self._seconds)[2]
        depth = self._depth(parent) + 1
        self._placed[peer] = (depth, leaf)
        if not leaf:
            heapq.heappush(self._tails, (depth, peer))
        return parent

    def _all_seconds(self) -> list[tuple[int, int, str]]:
        plan, placed = self._plan, self._placed
        single = ((peer, plan.children(peer)) for peer in plan.order)
        seconds = [self._second(peer, below[0] in plan.leaves) for peer, below in single if len(below) == 1]
        seconds += [self._second(peer, placed[below][1]) for peer, below in self._only.items()]
        heapq.heapify(seconds)
        return seconds

    def _depth(self, peer: str) -> int:
        return self._placed[peer][0] if peer in self._placed else self._plan.depth_of(peer)

    def _second(self, peer: str, leaf_below: bool) -> tuple[int, int, str]:
        # A second child halves the rate of all peers below the first child. Next to a single leaf that costs least, and
        # a high place is better; elsewhere a low place is better.
        depth = self._depth(peer)
        return (0, depth, peer) if leaf_below else (1, -depth, peer)


def demote(plan: Plan, members: Mapping[str, PlanMember], rates: Mapping[str, float], chains: int) -> Plan:
    """Propose to move forwarders that slow down a peer below them to tails, the fastest first. `rates`: every peer's
    rate in bits/s.
    """
    middle = median_bps(rates.values())
    feeds = plan.feeds
    wanted: dict[str, float] = {}  # the highest rate of any peer at or below, up to the median
    slow: list[str] = []
    for peer in reversed(plan.order):
        rate, below = rates[peer], 0.0
        for child in feeds.get(peer, ()):
            below = wanted[child] if wanted[child] > below else below
        if rate * GAMMA < below:
            slow.append(peer)
        own = rate if rate < middle else middle
        wanted[peer] = own if own > below else below
    slow.sort(key=lambda peer: (-rates[peer], peer))
    return grow(cut(plan, slow), [members[peer] for peer in slow], chains)


def straighten(plan: Plan, chains: int) -> Plan:
    """Propose to remove forks. If a peer feeds two others, the shorter branch moves to the tail of the shortest chain,
    or to the hub while the hub feeds fewer than `chains`. A leaf next to a forwarder moves to a tail. Each move changes
    one link. Two leaves below one peer stay.
    """
    parted = [
        c
        for c in plan.chains
        if plan.parent[c[0]] != ROOT and not plan.leaves.issuperset(plan.children(plan.parent[c[0]]))
    ]
    if not parted:
        return plan
    moving = {c[-1] for c in parted}
    room = [(0, ROOT)] * (chains - len(plan.children(ROOT))) + [tail for tail in plan.tails if tail[1] not in moving]
    heapq.heapify(room)
    put: dict[str, str] = {}
    for chain in sorted(parted, key=lambda c: (c[0] in plan.leaves, -len(c), c)):
        if not room:
            break
        depth, tail = heapq.heappop(room)
        put[chain[0]] = tail
        if chain[-1] not in plan.leaves:
            heapq.heappush(room, (depth + len(chain), chain[-1]))
    return plan.changed(plan.epoch, put)


def level(plan: Plan, chains: int) -> Plan:
    """Propose to have the hub feed exactly `chains` chains of even length, by moving the ends of chains.

    Chains that fork from another chain stay with it. Chains that end in a leaf are not extended.
    """
    whole = sorted((c for c in plan.chains if plan.parent[c[0]] == ROOT), key=lambda c: (-len(c), c))
    if not whole:
        return plan
    length = -(-sum(map(len, whole)) // chains)
    kept, surplus = whole[:chains], whole[chains:]
    pieces = deque([*surplus, *(c[length:] for c in kept if len(c) > length)])
    room = [(0, ROOT)] * (chains - len(kept))
    room += [(len(c), c[-1]) for c in kept if len(c) < length and c[-1] not in plan.leaves]
    heapq.heapify(room)
    put: dict[str, str] = {}
    while pieces and room:
        piece = pieces.popleft()
        have, tail = heapq.heappop(room)
        taken, rest = piece[: length - have], piece[length - have :]
        put[taken[0]] = tail
        if rest:
            pieces.appendleft(rest)
        elif have + len(taken) < length and taken[-1] not in plan.leaves:
            heapq.heappush(room, (have + len(taken), taken[-1]))
    return plan.changed(plan.epoch, put) if put else plan


def ways_in(plan: Plan, region_of: Callable[[str], str], root_region: str) -> dict[str, list[str]]:
    """Return region → its peers that are fed from outside it, parents before children. The hub's region is left out,
    and a peer without a label belongs to no region.
    """
    ways: dict[str, list[str]] = {}
    for peer in plan.order:
        if (region := region_of(peer)) and _enters(plan, peer, region, region_of, root_region):
            ways.setdefault(region, []).append(peer)
    return ways


def ways_after(
    ways: Mapping[str, list[str]], old: Plan, new: Plan, region_of: Callable[[str], str], root_region: str
) -> dict[str, list[str]]:
    """Return `ways_in` of the new plan. `ways`: that of an old plan of the same peers; only peers whose parent has
    changed are examined. New entries come last.
    """
    found = dict(ways)
    known = old.parent
    for peer, above in new.parent.items():
        if known[peer] == above or not (region := region_of(peer)):
            continue
        others = [way for way in found.pop(region, ()) if way != peer]
        if _enters(new, peer, region, region_of, root_region):
            others.append(peer)
        if others:
            found[region] = others
    return found


def _enters(plan: Plan, peer: str, region: str, region_of: Callable[[str], str], root_region: str) -> bool:
    """Whether the peer, which is in `region`, is fed from outside it, and `region` is not the hub's."""
    above = plan.parent[peer]
    return region not in (root_region, root_region if above == ROOT else region_of(above))


def gather(plan: Plan, ways: Sequence[str], region_of: Callable[[str], str], rates: Mapping[str, float]) -> Plan:
    """Propose to enter a region once (SparrowRL's relay). `ways`: the region's peers that are fed from outside (the
    entries); `rates`: every peer's rate in bits/s.

    One entry stays: the fastest that is not below another. The other entries move, the fastest first, to the end of the
    chain inside the region. The peer that this end fed outside the region moves to the moved entry's old parent. If the
    entry is below that peer, the two change places. An entry for which there is no such place stays.
    """
    region = region_of(ways[0])
    tops = [way for way in ways if not any(above in ways for above in plan.path(way)[:-1])]
    ranked = sorted(ways, key=lambda way: (way in plan.leaves, -rates[way], way))
    kept = next(way for way in ranked if way in tops)
    for way in ranked:
        end = None if way == kept else _end(plan, kept, region, region_of)
        if end is None or way in plan.path(end):
            continue
        put = {way: end}
        for displaced in plan.children(end):
            put[displaced] = plan.parent[way]
            if displaced in plan.path(plan.parent[way]):
                last = _end(plan, way, region, region_of)
                if last is None:
                    break
                put |= {displaced: last} | dict.fromkeys(plan.children(last), plan.parent[way])
        else:
            plan = plan.changed(plan.epoch, put)
    return plan


def _end(plan: Plan, peer: str, region: str, region_of: Callable[[str], str]) -> str | None:
    """Return the region's last peer in the chain from `peer` on, if it may feed another; None if the chain forks."""
    while len(below := [child for child in plan.children(peer) if region_of(child) == region]) == 1:
        peer = below[0]
    return None if below or len(plan.children(peer)) > 1 or peer in plan.leaves else peer


def merge(plan: Plan, most: int) -> Plan:
    """Propose to have the hub feed at most `most` peers, at any cost in time. The smallest subtrees move, one link
    each, to the highest tails; failing that, next to a leaf, or below the lowest peer with one child.
    """
    while len(heads := plan.children(ROOT)) > most:
        size, head = min((len(plan.subtree(peer)), peer) for peer in heads)
        own = plan.subtree(head)
        tails = ((0, depth, peer) for depth, peer in plan.tails if peer not in own)
        beside = (
            (1, -plan.depth_of(peer), peer) if below[0] not in plan.leaves else (0, len(plan) + size, peer)
            for peer in plan.order
            if len(below := plan.children(peer)) == 1 and peer not in own
        )
        place = min((*tails, *beside), default=None)
        if place is None:
            break
        plan = plan.changed(plan.epoch, {head: place[2]})
    return plan
