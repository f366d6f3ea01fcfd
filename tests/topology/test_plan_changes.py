"""Changes to a running plan: by hand, and by a state machine that joins, kills, re-attaches and replans in any
order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from topology.broadcast_time import number_of_chains
from topology.plan import make_plan
from topology.plan_changes import (
    admit,
    adopt,
    demote,
    excise,
    gather,
    level,
    lower,
    merge,
    moves,
    straighten,
    validate,
    ways_after,
    ways_in,
)
from topology.plan_tree import MAX_CHILDREN, ROOT, LoopError, ParentFullError, Plan, PlanError, PlanMember

TREE = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b", "d": "c", "x": "b", "y": ROOT})


def test_an_orphan_goes_to_its_nearest_live_ancestor() -> None:
    new = excise(TREE, {"c"}, epoch=(1, 2))
    assert moves(TREE, new) == [("d", "b")]
    new = excise(TREE, {"b", "c"}, epoch=(1, 2))
    assert moves(TREE, new) == [("d", "a"), ("x", "a")]
    new = excise(TREE, {"a", "b", "c"}, epoch=(1, 2))
    assert moves(TREE, new) == [("d", ROOT), ("x", ROOT)]
    assert new.epoch == (1, 2)


def test_an_ancestor_without_room_is_passed_over() -> None:
    plan = Plan((1, 1), {"r": ROOT, "a": "r", "b": "a", "e": "a", "c": "b", "d": "b"})
    assert moves(plan, excise(plan, {"b"}, epoch=(1, 2))) == [("d", "r"), ("c", "a")]


def test_excising_no_peer_returns_the_plan() -> None:
    assert excise(TREE, set(), epoch=(0, 0)) is TREE
    assert excise(TREE, {"stranger"}, epoch=(0, 0)) is TREE
    with pytest.raises(PlanError, match="epoch"):
        excise(TREE, {"c"}, epoch=(1, 1))


def test_adopt_follows_the_peer_and_its_chain_comes_along() -> None:
    new = adopt(TREE, "c", "a", epoch=(1, 2))
    assert moves(TREE, new) == [("c", "a")]
    assert new.path("d") == ("a", "c", "d")
    assert adopt(TREE, "c", "b", epoch=(0, 0)) is TREE
    assert adopt(TREE, "b", ROOT, epoch=(2, 0)).children(ROOT) == ("a", "b", "y")


def test_adopt_refuses_loops_full_parents_and_strangers() -> None:
    for below in ("b", "c", "d", "x"):
        with pytest.raises(LoopError):
            adopt(TREE, "b", below, epoch=(1, 2))
    with pytest.raises(ParentFullError):
        adopt(TREE, "y", "b", epoch=(1, 2))
    with pytest.raises(ParentFullError):
        adopt(Plan((1, 1), {"a": ROOT, "b": ROOT}, frozenset("b")), "a", "b", epoch=(1, 2))
    for peer, parent in (("z", "a"), ("a", "z")):
        with pytest.raises(PlanError, match="'z'"):
            adopt(TREE, peer, parent, epoch=(1, 2))


def test_a_replacement_is_appended_at_the_shortest_tail() -> None:
    members = [PlanMember(c, bps=100e6) for c in "abcdef"]
    plan = make_plan(members, 200e6, epoch=(1, 1))
    assert plan.chains == (("a", "c", "e"), ("b", "d", "f"))
    without = excise(plan, {"c"}, epoch=(1, 2))
    back = admit(without, PlanMember("c", bps=100e6), chains=2, epoch=(1, 3))
    assert moves(without, back) == [("c", "e")]
    with pytest.raises(PlanError, match="already"):
        admit(back, PlanMember("c"), chains=2, epoch=(1, 4))


def test_a_newcomer_goes_to_the_shortest_chain_for_any_ids() -> None:
    plan = Plan((1, 1), {**line("a", 3), **line("y", 1), **line("z", 2)})
    assert admit(plan, PlanMember("n"), chains=3, epoch=(1, 2)).parent["n"] == "y0"
    assert admit(plan, PlanMember("n"), chains=4, epoch=(1, 2)).parent["n"] == ROOT


def test_a_newcomer_is_not_fed_by_a_leaf() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "l": "b"}, frozenset("l"))
    assert admit(plan, PlanMember("n"), chains=1, epoch=(1, 2)).parent["n"] == "b"
    assert (
        admit(Plan((1, 1), {"a": ROOT, "b": "a"}), PlanMember("n"), chains=1, turned="b", epoch=(1, 2)).parent["n"]
        == "a"
    )
    alone = Plan((1, 1), {"l": ROOT}, frozenset("l"))
    assert admit(alone, PlanMember("n"), chains=1, epoch=(1, 2)).parent["n"] == ROOT


def test_a_newcomer_below_its_region_begins_no_chain() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a"})
    newcomer = PlanMember("n", "eu")
    assert admit(plan, newcomer, chains=5, region_of=lambda _: "eu", apart=True, epoch=(1, 2)).parent["n"] == "b"
    assert admit(plan, newcomer, chains=5, region_of=lambda _: "eu", epoch=(1, 2)).parent["n"] == ROOT
    assert admit(plan, newcomer, chains=5, region_of=lambda _: "us", apart=True, epoch=(1, 2)).parent["n"] == ROOT
    long = Plan((1, 1), {f"p{n:02}": f"p{n - 1:02}" if n else ROOT for n in range(9)})
    assert admit(long, newcomer, chains=5, region_of=lambda _: "eu", apart=True, epoch=(1, 2)).parent["n"] == ROOT


def test_a_regions_outer_child_takes_the_newcomers_place() -> None:
    where = {"v2": "va", "v1": "va", "f": "eu", "o": "ohio"}
    plan = Plan((1, 1), {"o": ROOT, "v2": "o", "f": "v2", "v1": ROOT})
    assert ways_in(plan, where.__getitem__, "") == {"ohio": ["o"], "va": ["v1", "v2"], "eu": ["f"]}
    assert ways_in(plan, lambda peer: "" if peer == "o" else where[peer], "va") == {"eu": ["f"]}
    assert ways_in(plan, where.__getitem__, "va") == {"ohio": ["o"], "eu": ["f"]}
    gathered = gather(plan, ["v1", "v2"], where.__getitem__, {"v1": 1e6, "v2": 2e6})
    assert dict(gathered.parent) == {"o": ROOT, "v2": "o", "v1": "v2", "f": ROOT}
    before, after = (ways_in(each, where.__getitem__, "") for each in (plan, gathered))
    assert ways_after(before, plan, gathered, where.__getitem__, "") == after
    assert ways_after(after, gathered, plan, where.__getitem__, "") == before | {"va": ["v2", "v1"]}


def test_a_region_that_a_chain_leaves_and_comes_back_to_is_gathered_too() -> None:
    """The faster way in hangs below the slower one, so that one stays."""
    where = {"v1": "va", "f1": "eu", "v2": "va", "v3": "va", "f2": "eu"}
    plan = Plan((1, 1), {"v1": ROOT, "f1": "v1", "v2": "f1", "v3": "v2", "f2": "v3"})
    gathered = gather(plan, ["v1", "v2"], where.__getitem__, dict.fromkeys(where, 1e6) | {"v2": 2e6})
    assert gathered.order == ("v1", "v2", "v3", "f1", "f2")


def test_gather_without_a_place_changes_nothing() -> None:
    where = {"v1": "va", "f1": "eu", "f2": "eu", "v2": "va", "v3": "va"}
    parted = Plan((1, 1), {"v1": ROOT, "f1": "v1", "f2": "v1", "v2": ROOT})
    assert gather(parted, ["v1", "v2"], where.__getitem__, dict.fromkeys(where, 1e6)) is parted
    below = Plan((1, 1), {"v1": ROOT, "f1": "v1", "v2": "f1", "f2": "v2", "v3": "v2"}, frozenset({"v3"}))
    assert gather(below, ["v1", "v2"], where.__getitem__, dict.fromkeys(where, 1e6)) is below


def test_validate_names_broken_invariants() -> None:
    members = [PlanMember(c) for c in "abcdxy"]
    validate(TREE, members)
    with pytest.raises(PlanError, match="'z'"):
        validate(TREE, [*members, PlanMember("z")])
    with pytest.raises(PlanError, match="'a'"):
        validate(TREE, members[1:])
    with pytest.raises(PlanError, match="'a' is a leaf"):
        validate(TREE, [PlanMember("a", leaf=True), *members[1:]])


def test_moves_lists_parents_before_children() -> None:
    assert moves(Plan((1, 1), {}), TREE) == [(p, TREE.parent[p]) for p in TREE.order]
    assert moves(TREE, Plan((1, 2), {})) == []


def line(start: str, length: int) -> dict[str, str]:
    return {f"{start}{i}": f"{start}{i - 1}" if i else ROOT for i in range(length)}


def test_level_moves_the_end_of_a_long_chain_to_short_chains() -> None:
    plan = Plan((1, 1), {**line("a", 7), **line("b", 1), **line("c", 1)})
    new = level(plan, 3)
    assert moves(plan, new) == [("a3", "b0"), ("a5", "c0")]
    assert new.chains == (("a0", "a1", "a2"), ("b0", "a3", "a4"), ("c0", "a5", "a6"))
    assert level(new, 3) == new
    assert [len(c) for c in level(plan, 1).chains] == [9]
    assert [len(c) for c in level(plan, 5).chains] == [2, 2, 2, 2, 1]


def test_demote_moves_only_peers_that_slow_others_beyond_noise() -> None:
    plan = Plan((1, 1), line("a", 6))
    rates = {"a0": 95.0, "a1": 50.0, "a2": 100.0, "a3": 20.0, "a4": 100.0, "a5": 5.0}
    members = {peer: PlanMember(peer, bps=rate) for peer, rate in rates.items()}
    assert demote(plan, members, rates, 1).chains == (("a0", "a2", "a4", "a5", "a1", "a3"),)
    swapped = rates | {"a1": 20.0, "a3": 50.0}
    assert demote(plan, members, swapped, 1).chains == (("a0", "a2", "a4", "a5", "a3", "a1"),)
    assert demote(plan, members, rates | {"a1": 95.0, "a3": 95.0}, 1) == plan


@st.composite
def trees(draw: st.DrawFn) -> Plan:
    parent: dict[str, str] = {}
    for index in range(draw(st.integers(0, 30))):
        free = [p for p in parent if list(parent.values()).count(p) < MAX_CHILDREN]
        parent[f"p{draw(st.integers(0, 9))}{index}"] = draw(st.sampled_from([ROOT, *free]))
    return Plan((1, 1), parent)


def test_merge_hangs_the_smallest_branches_at_the_highest_tails() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": "d", "f": ROOT})
    assert moves(plan, merge(plan, 2)) == [("f", "b")]
    assert merge(plan, 3) is plan
    leaves = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": ROOT}, frozenset("bde"))
    assert merge(leaves, 2).parent["e"] in "ac", "beside a leaf"
    nobody = Plan((1, 1), dict.fromkeys("abc", ROOT), frozenset("abc"))
    assert merge(nobody, 1) is nobody, "leaves have only the hub"


@settings(deadline=None)
@given(trees(), st.integers(1, 4))
def test_merge_moves_heads_alone_and_reaches_its_number(plan: Plan, most: int) -> None:
    merged = merge(plan, most)
    assert len(merged.children(ROOT)) == min(most, len(plan.children(ROOT)))
    assert {peer for peer, _ in moves(plan, merged)} <= set(plan.children(ROOT))


@settings(deadline=None)
@given(trees(), st.data())
def test_only_orphans_move_and_each_to_an_ancestor(plan: Plan, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.sampled_from(plan.order))) if plan.order else set()
    new = excise(plan, dead, epoch=(1, 2))
    assert set(new.parent) == set(plan.parent) - dead
    assert {peer for peer, _ in moves(plan, new)} == {p for p in new.parent if plan.parent[p] in dead}
    for peer, parent in moves(plan, new):
        assert parent in plan.backups(peer)
        nearer = [p for p in plan.backups(peer)[: plan.backups(peer).index(parent)] if p not in dead]
        assert all(len(new.children(p)) == MAX_CHILDREN for p in nearer)


class Fleet(RuleBasedStateMachine):
    """A hub's view of a fleet that changes in every way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, PlanMember] = {}
        self.plan = Plan((1, 0), {})
        self.uplink_bps = 300e6
        self.born = 0

    def next_epoch(self) -> tuple[int, int]:
        return (self.plan.epoch[0], self.plan.epoch[1] + 1)

    def newborn(self, bps: float | None, region: str, leaf: bool) -> PlanMember:
        self.born += 1
        return PlanMember(f"p{self.born * 7919 % 1000:03}-{self.born}", region, bps, None, leaf)

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.members)))

    @initialize(n=st.integers(0, 12), uplink=st.sampled_from([50e6, 300e6, 2e9]))
    def begin(self, n: int, uplink: float) -> None:
        self.uplink_bps = uplink
        fresh = [self.newborn(100e6, "eu", False) for _ in range(n)]
        self.members = {m.id: m for m in fresh}
        self.plan = make_plan(fresh, uplink, epoch=self.next_epoch())

    @rule(bps=st.sampled_from([None, 10e6, 100e6]), region=st.sampled_from(["eu", "us"]), leaf=st.booleans())
    def join(self, bps: float | None, region: str, leaf: bool) -> None:
        member = self.newborn(bps, region, leaf)
        before = self.plan
        self.members[member.id] = member
        chains = number_of_chains(self.uplink_bps, [m.bps for m in self.members.values()], len(self.members))
        turned = [m.id for m in self.members.values() if m.leaf]
        self.plan = admit(before, member, chains=chains, turned=turned, epoch=self.next_epoch())
        assert [peer for peer, _ in moves(before, self.plan)] == [member.id]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if not self.members:
            return
        dead = data.draw(st.sets(st.sampled_from(sorted(self.members)), min_size=1, max_size=4))
        before = self.plan
        self.plan = excise(before, dead, epoch=self.next_epoch())
        for peer in dead:
            del self.members[peer]
        assert all(before.parent[peer] in dead for peer, _ in moves(before, self.plan))

    @rule(data=st.data())
    def fall_behind(self, data: st.DataObject) -> None:
        if not self.members:
            return
        peer = self.some(data)
        before = self.plan
        self.plan = lower(before, PlanMember(peer, leaf=True), epoch=self.next_epoch())
        self.members[peer] = replace(self.members[peer], leaf=True)
        assert not self.plan.children(peer)
        assert all(p == peer or before.parent[p] == peer for p, _ in moves(before, self.plan))

    @rule(chains=st.integers(1, 5))
    def straighten(self, chains: int) -> None:
        before = self.plan
        self.plan = straighten(before, chains).under(self.next_epoch())
        forked = {c for p in before.order for c in before.children(p) if len(before.children(p)) > 1}
        assert {p for p, _ in moves(before, self.plan)} <= forked

    @rule(data=st.data())
    def reattach(self, data: st.DataObject) -> None:
        if not self.members:
            return
        peer = self.some(data)
        target = data.draw(st.sampled_from([ROOT, *sorted(self.members)]))
        before = self.plan
        try:
            self.plan = adopt(before, peer, target, epoch=self.next_epoch())
        except LoopError:
            assert peer in before.path(target)
        except ParentFullError:
            assert target in before.leaves or len(before.children(target)) == MAX_CHILDREN
        else:
            assert moves(before, self.plan) in ([], [(peer, target)])

    @rule(data=st.data(), bps=st.sampled_from([1e6, 100e6, 1e9]), score=st.floats(0, 100), leaf=st.booleans())
    def measure(self, data: st.DataObject, bps: float, score: float, leaf: bool) -> None:
        if not self.members:
            return
        peer = self.some(data)
        turns = leaf and not self.members[peer].leaf
        self.members[peer] = PlanMember(peer, self.members[peer].region, bps, score, leaf)
        if turns:  # a peer that stops forwarding is planned around at once
            self.replan(self.uplink_bps, 1 << 24)

    @rule(uplink=st.sampled_from([50e6, 300e6, 2e9]), payload=st.sampled_from([1 << 10, 1 << 24, 1 << 34]))
    def replan(self, uplink: float, payload: int) -> None:
        self.uplink_bps = uplink
        self.plan = make_plan(
            self.members.values(), uplink, epoch=self.next_epoch(), previous=self.plan, payload_bytes=payload
        )
        again = make_plan(
            self.members.values(), uplink, epoch=self.next_epoch(), previous=self.plan, payload_bytes=payload
        )
        assert again is self.plan

    @invariant()
    def sound(self) -> None:
        validate(self.plan, self.members.values())
        anew = Plan(
            self.plan.epoch, dict(self.plan.parent), self.plan.leaves
        )  # the results of single changes, computed at once
        assert (anew, anew.order, anew.chains, anew.tails) == (
            self.plan,
            self.plan.order,
            self.plan.chains,
            self.plan.tails,
        )
        assert all(anew.depth_of(p) == self.plan.depth_of(p) for p in (ROOT, *anew.order))
        reached = [ROOT]
        for peer in reached:  # walks as it grows: a loop would never end, a peer fed twice would be there twice
            reached += self.plan.children(peer)
            assert peer == ROOT or len(self.plan.children(peer)) <= MAX_CHILDREN
        assert sorted(reached) == sorted([ROOT, *self.members])


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFleet = Fleet.TestCase
