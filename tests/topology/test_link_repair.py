"""Plans in which not every pair of peers can be linked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.link_repair import deal_linkable, repair_links
from topology.plan import make_plan
from topology.plan_changes import moves, validate
from topology.plan_tree import ROOT, Plan, PlanMember

MBIT = 1e6


def no_two_of(shut: set[str]):
    """Two behind NATs cannot be linked."""
    return lambda above, below: not (above in shut and below in shut)


def sound(plan: Plan, links) -> bool:
    return all(above == ROOT or links(above, peer) for peer, above in plan.parent.items())


def test_a_plan_that_is_right_is_left_alone() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a"})
    assert repair_links(plan, no_two_of({"b"}), 1) is plan


def test_an_unlinkable_peer_moves_to_a_tail_with_its_branch() -> None:
    plan = Plan((1, 1), {"n": ROOT, "m": "n", "c": "m", "a": ROOT, "b": "a"})
    mended = repair_links(plan, no_two_of({"n", "m"}), 2)
    assert moves(plan, mended) == [("m", "b")]
    assert mended.parent["c"] == "m"


def test_an_unlinkable_peer_begins_a_missing_chain() -> None:
    plan = Plan((1, 1), {"n": ROOT, "m": "n"})
    assert repair_links(plan, no_two_of({"n", "m"}), 2).parent["m"] == ROOT


def test_without_a_reachable_tail_a_peer_becomes_a_low_second_child() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "n": "b", "m": "n"})
    assert repair_links(plan, no_two_of({"n", "m"}), 1).parent["m"] == "b"
    leafy = Plan((1, 1), {"a": ROOT, "l": "a", "b": ROOT, "c": "b", "n": "c", "m": "n"}, frozenset("l"))
    assert repair_links(leafy, no_two_of({"n", "m"}), 2).parent["m"] == "a", "beside a leaf it slows no peer down"


def test_without_any_possible_link_the_hub_feeds_all() -> None:
    members = [PlanMember(f"p{i}") for i in range(9)]
    shut = {m.id for m in members}
    plan = make_plan(members, 200 * MBIT, epoch=(1, 1), links=no_two_of(shut))
    assert set(plan.parent.values()) == {ROOT}


@st.composite
def fleets(draw: st.DrawFn):
    size = draw(st.integers(1, 14))
    members = [
        PlanMember(f"p{i:02}", bps=draw(st.sampled_from([None, 20e6, 100e6])), leaf=draw(st.integers(0, 5)) == 0)
        for i in range(size)
    ]
    ids = [m.id for m in members]
    apart = draw(st.sets(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=40))
    return members, lambda above, below: (above, below) not in apart and (below, above) not in apart


@given(fleets(), st.sampled_from([50e6, 300e6]), st.integers(1, 14))
def test_every_planned_link_is_possible(fleet, uplink, before) -> None:
    members, links = fleet
    plan = make_plan(members, uplink, epoch=(1, 1), links=links)
    validate(plan, members)
    assert sound(plan, links)
    assert make_plan(members, uplink, epoch=(1, 2), previous=plan, links=links) is plan, "a plan that is mended stays"
    previous = make_plan(members[:before], uplink, epoch=(1, 1))
    after = make_plan(members, uplink, epoch=(1, 2), previous=previous, links=links)
    validate(after, members)
    assert sound(after, links)


@given(fleets(), st.integers(1, 4))
def test_link_repair_moves_only_unlinkable_peers(fleet, chains) -> None:
    members, links = fleet
    plan = make_plan(members, 100e6 * chains, epoch=(1, 1))
    mended = repair_links(plan, links, chains)
    assert {peer for peer, _ in moves(plan, mended)} == {
        p for p, above in plan.parent.items() if above != ROOT and not links(above, p)
    }
    assert repair_links(mended, links, chains) is mended


def test_peers_with_few_links_stand_between_the_others() -> None:
    """Half of a fleet accepts no connections, and no peer becomes slower by that."""
    members = [PlanMember(f"p{i:02}", bps=100 * MBIT, score=float(i)) for i in range(16)]
    shut = {f"p{i:02}" for i in range(8)}
    free = make_plan(members, 300 * MBIT, epoch=(1, 1))
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1), links=no_two_of(shut))
    assert (len(plan.children(ROOT)), plan.depth) == (len(free.children(ROOT)), free.depth)
    assert all(len(plan.children(p)) < 2 for p in plan.parent)


@given(fleets(), st.integers(1, 4))
def test_dealt_chains_are_linkable_and_even(fleet, chains) -> None:
    members, links = fleet
    woven = deal_linkable([m.id for m in members], links, chains)
    plan = Plan((1, 1), woven)
    assert sound(plan, links)
    assert len(plan.children(ROOT)) == min(chains, len(members))
    if all(links(a.id, b.id) for a in members for b in members if a is not b):
        assert len(woven) == len(members)
        assert plan.depth == -(-len(members) // chains)
