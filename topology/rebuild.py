"""Changes to a plan that leave alone whoever they can.

Promise: peers are cut out, put in and moved one link at a time. `excise` moves the orphans of the dead and nobody else, `admit` moves nobody,
`adopt` writes down what a peer has already done. Each returns the plan it was given when nothing changes, and otherwise one under the new epoch,
which must be above the old. `demote`, `straighten`, `level`, `gather`, `merge` and `stand_back` are the planner's repairs, proposals that keep the old epoch. All of it is deterministic.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from topology.model import median_bps
from topology.tree import MAX_CHILDREN, ROOT, Epoch, FullError, LoopError, Member, Plan, PlanError, by_id

GAMMA: Final = 1.1
"""Hysteresis: what is not better by more than this factor is noise. ECHO-2 (section 4.3) finds that 10 % absorbs short-term fluctuation."""

FAR_HOPS: Final = 6
"""Hops inside a region that take as long as one between two, at `topology.model`'s usual pieces, rates and round trips."""


def excise(plan: Plan, dead: Iterable[str], *, epoch: Epoch) -> Plan:
    """Cut the dead out. Each of their children goes to its nearest live ancestor that has room, else to ROOT. Ids not in the plan are ignored."""
    return renew(plan, cut(plan, dead), epoch)


def adopt(plan: Plan, peer: str, new_parent: str, *, epoch: Epoch) -> Plan:
    """`peer` reports that it hangs below `new_parent` (or ROOT) now; its own chain comes along.

    Raises LoopError when the new parent is below the peer, FullError when it may not feed one more (a leaf of this plan: none), PlanError when
    either is not in the plan.
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
        raise FullError(f"peer {peer!r} cannot hang below {new_parent!r}, which feeds as many as it may")
    return renew(plan, plan.changed(plan.epoch, {peer: new_parent}), epoch)


def admit(
    plan: Plan,
    member: Member,
    *,
    chains: int,
    turned: Iterable[str] = (),
    region_of: Callable[[str], str] = lambda _: "",
    apart: bool = False,
    epoch: Epoch,
) -> Plan:
    """Append a newcomer or a replacement at the tail of the shortest chain, or as a new head while there are fewer than `chains`.

    A tail in the newcomer's own region is preferred while its chain is not longer than the shortest by more than `FAR_HOPS`; with `apart`, it is preferred
    to beginning a chain, too, as long as it is no further down than that. `turned`: members
    that have become leaves since the plan was made; those that feed nobody yet are not asked to feed the newcomer. Takes time in proportion to
    the number of chains, copies apart. Raises PlanError when the newcomer is in the plan already.
    """
    if member.id in plan:
        raise PlanError(f"peer {member.id!r} is in the plan already: excise it before it comes back")
    fresh = {p for p in turned if p in plan and p not in plan.leaves and not plan.children(p)}
    known = plan.changed(plan.epoch, {}, leaves=plan.leaves | fresh) if fresh else plan
    return renew(plan, _appended(known, member, chains, region_of, apart=apart), epoch)


def _appended(plan: Plan, member: Member, chains: int, region_of: Callable[[str], str], *, apart: bool = False) -> Plan:
    full = len(plan.children(ROOT)) >= chains
    near = _near(plan, member.region, region_of, None if full else 0) if full or apart else None
    if near is None:
        return grow(plan, [member], chains)
    leaves = plan.leaves | {member.id} if member.leaf else None
    return plan.changed(plan.epoch, {member.id: near}, leaves=leaves)


def _near(plan: Plan, region: str, region_of: Callable[[str], str], elsewhere: int | None) -> str | None:
    """The highest tail in the region, unless a place elsewhere is higher by more than a crossing is worth. `elsewhere`: its depth; None: the highest tail's."""
    for depth, peer in plan.tails:
        if depth > (plan.tails[0][0] if elsewhere is None else elsewhere) + FAR_HOPS:
            break
        if region_of(peer) == region:
            return peer
    return None


def lower(plan: Plan, member: Member, *, region_of: Callable[[str], str] = lambda _: "", epoch: Epoch) -> Plan:
    """Take one out of the way of those below it: it goes to a tail, as a leaf if `member` is one, in its own region as `admit` would; its children
    go where an orphan's would."""
    return renew(plan, stand_back(plan, member, region_of), epoch)


def misplaced(plan: Plan, members: Mapping[str, Member]) -> list[str]:
    """Members that stand in front of one of better standing where their own does not allow it (`topology.standing`), the best first."""
    best: dict[str, int] = {}  # of all below
    found: list[Member] = []
    for peer in reversed(plan.order):
        member = members[peer]
        best[peer] = min((min(best[child], members[child].standing) for child in plan.children(peer)), default=member.standing)
        if best[peer] < member.standing and (member.standing > 1 or plan.parent[peer] == ROOT):
            found.append(member)
    return [m.id for m in sorted(found, key=lambda m: (m.standing, m.id))]


def stand_back(plan: Plan, member: Member, region_of: Callable[[str], str]) -> Plan:
    """Propose to move one to a tail, in its own region as `admit` would; its children go where an orphan's would."""
    return _appended(cut(plan, [member.id]), member, 0, region_of)


def moves(old: Plan, new: Plan) -> list[tuple[str, str]]:
    """(peer, new parent) for everyone whose parent changed or who is new, parents before children."""
    return [(peer, new.parent[peer]) for peer in new.order if old.parent.get(peer) != new.parent[peer]]


def validate(plan: Plan, members: Iterable[Member]) -> None:
    """Raise PlanError unless the plan reaches each member once, nobody else, and asks no leaf to forward.

    That it is a tree within its degree needs no check here: no other plan can be built.
    """
    table = by_id(members)
    if missing := table.keys() - plan.parent.keys():
        raise PlanError(f"{len(missing)} live peers are not reached, {min(missing)!r} first")
    if strangers := plan.parent.keys() - table.keys():
        raise PlanError(f"{len(strangers)} peers of the plan are not members, {min(strangers)!r} first")
    if loaded := [m.id for m in table.values() if m.leaf and plan.children(m.id)]:
        raise PlanError(f"{loaded[0]!r} is a leaf and yet feeds {plan.children(loaded[0])[0]!r}")


def renew(old: Plan, changed: Plan, epoch: Epoch) -> Plan:
    """`old` itself when `changed` is no different, else `changed` under the new epoch. Raises PlanError unless that is above the old one."""
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
            while above != ROOT and (above in gone or load.setdefault(above, len(plan.children(above))) >= MAX_CHILDREN):
                above = plan.parent[above]
            put[orphan] = above
            load[above] = load.get(above, 0) + 1
    return plan.changed(plan.epoch, put, gone, plan.leaves - gone if plan.leaves & gone else None)


def grow(plan: Plan, newcomers: Sequence[Member], chains: int) -> Plan:
    """Append the newcomers in the order given, moving nobody, under the old epoch."""
    if not newcomers:
        return plan
    slots = _Slots(plan, chains)
    put = {member.id: slots.take(member.id, member.leaf) for member in newcomers}
    leaves = {m.id for m in newcomers if m.leaf}
    return plan.changed(plan.epoch, put, leaves=plan.leaves | leaves if leaves else None)


class _Slots:
    """The places where a newcomer can be hung without moving anyone, the best first: a chain not yet begun, the tail of the shortest chain, a
    second child where all chains end in leaves, the hub."""

    def __init__(self, plan: Plan, chains: int) -> None:
        self._plan = plan
        self._heads_left = chains - len(plan.children(ROOT))
        self._tails = list(plan.tails)  # ascending, and so a heap
        self._placed: dict[str, tuple[int, bool]] = {}
        """Newcomers so far: depth, and whether a leaf."""
        self._only: dict[str, str] = {}
        """Parents that had nobody below them → the newcomer there."""
        self._seconds: list[tuple[int, int, str]] | None = None
        """Made when it is first needed: that is rare, and takes a look at everybody."""

    def take(self, peer: str, leaf: bool) -> str:
        """Place one peer and return its parent. O(log n)."""
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
        # A second child halves the rate of everyone below the first: beside a lone leaf it costs least (then the higher the better), elsewhere
        # the lower the better.
        depth = self._depth(peer)
        return (0, depth, peer) if leaf_below else (1, -depth, peer)


def demote(plan: Plan, members: Mapping[str, Member], rates: Mapping[str, float], chains: int) -> Plan:
    """Propose to move forwarders that hold back someone below them to tails, the fastest of them first. `rates` in bits/s, all known."""
    middle = median_bps(rates.values())
    wanted: dict[str, float] = {}  # the most that anyone at or below can take, up to the median
    slow: list[str] = []
    for peer in reversed(plan.order):
        below = max((wanted[child] for child in plan.children(peer)), default=0.0)
        if rates[peer] * GAMMA < below:
            slow.append(peer)
        wanted[peer] = max(below, min(rates[peer], middle))
    slow.sort(key=lambda peer: (-rates[peer], peer))
    return grow(cut(plan, slow), [members[peer] for peer in slow], chains)


def straighten(plan: Plan, chains: int) -> Plan:
    """Propose to end forks: where a peer feeds two, the chain that parts from the taller one goes to the shortest chain's tail, or to the hub
    while that feeds too few; a leaf beside one that forwards goes to a tail. One link for each. Two leaves at one tail stay."""
    parted = [
        c for c in plan.chains if plan.parent[c[0]] != ROOT and not plan.leaves.issuperset(plan.children(plan.parent[c[0]]))
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
    """Propose to make the hub feed just so many chains, none longer than need be, by moving whole ends of chains: one link for each.

    Chains that part from another below the hub stay with it. Chains that end in a leaf are not extended.
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
    """Of each region but the hub's, those of its peers that are fed from outside, parents before children. Who names no region is in none."""
    ways: dict[str, list[str]] = {}
    for peer in plan.order:
        region, above = region_of(peer), plan.parent[peer]
        if region and region != root_region and region != (root_region if above == ROOT else region_of(above)):
            ways.setdefault(region, []).append(peer)
    return ways


def gather(plan: Plan, ways: Sequence[str], region_of: Callable[[str], str], rates: Mapping[str, float]) -> Plan:
    """Propose to have a region entered once. `ways`: its peers that are fed from outside, parents before children; `rates` in bits/s, all known.

    The fastest of them that hangs below no other stays. The others go, the fastest first, to the end of what it feeds inside; what that feeds outside goes where
    the newcomer was, or, where it feeds the newcomer itself, they change places. Those for whom there is no such place stay too.
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
    """The last of the region in the chain from `peer` on, if it may feed one; None where that parts."""
    while len(below := [child for child in plan.children(peer) if region_of(child) == region]) == 1:
        peer = below[0]
    return None if below or len(plan.children(peer)) > 1 or peer in plan.leaves else peer


def merge(plan: Plan, most: int) -> Plan:
    """Have the hub feed no more than `most`, whatever it costs: the smallest branches go to the highest tails, or beside a leaf, or where a second child does
    least harm; one link for each."""
    while len(heads := plan.children(ROOT)) > most:
        size, head = min((len(plan.branch(peer)), peer) for peer in heads)
        own = plan.branch(head)
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
