"""Plans from nothing and from a previous plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.broadcast_time import BroadcastNetwork, Prediction, member_rates, predict, predict_at, time_to_last_s
from topology.plan import make_plan
from topology.plan_changes import moves, validate
from topology.plan_tree import ROOT, LoopError, ParentFullError, Plan, PlanError, PlanMember, by_id

MBIT = 1e6
PAYLOAD = 64 << 20


def fleet(n: int, **fields: object) -> list[PlanMember]:
    base = PlanMember("x", bps=100 * MBIT)
    return [replace(base, id=f"p{i:05}", score=100.0 - i / n, **fields) for i in range(n)]  # type: ignore[arg-type]


@st.composite
def memberships(draw: st.DrawFn, max_size: int = 24) -> list[PlanMember]:
    ids = draw(st.sets(st.text("abcdefgh", min_size=1, max_size=3), max_size=max_size))
    rates = st.none() | st.sampled_from([0.0, 1e6, 95e6, 100e6, 1e9]) | st.floats(1, 1e11)
    scores = st.none() | st.sampled_from([0.0, 50.0, 90.0]) | st.floats(0, 100)
    return [
        PlanMember(
            i, draw(st.sampled_from(["", "eu", "us", "ap"])), draw(rates), draw(scores), draw(st.integers(0, 4)) == 0
        )
        for i in sorted(ids)
    ]


UPLINKS = st.sampled_from([10e6, 300e6, 1e9]) | st.floats(1, 1e12)


def test_heads_are_the_best_and_the_rest_are_dealt_in_score_order() -> None:
    plan = make_plan(reversed(fleet(8)), 300 * MBIT, epoch=(1, 1))
    assert plan.chains == (("p00000", "p00003", "p00006"), ("p00001", "p00004", "p00007"), ("p00002", "p00005"))
    assert plan.epoch == (1, 1)
    assert plan.depth == 3


def test_unknown_scores_count_as_the_median_and_ties_go_by_id() -> None:
    members = [PlanMember("d", score=90.0), PlanMember("c", score=10.0), PlanMember("b", score=50.0), PlanMember("a")]
    assert make_plan(members, 100 * MBIT, epoch=(1, 1)).chains == (("d", "a", "b", "c"),)
    assert make_plan([PlanMember(c) for c in "cab"], 100 * MBIT, epoch=(1, 1)).chains == (("a", "b", "c"),)


def test_leaves_hang_at_tails() -> None:
    members = [replace(m, leaf=i < 2) for i, m in enumerate(fleet(7))]  # the best two may not forward
    plan = make_plan(members, 200 * MBIT, epoch=(1, 1))
    assert plan.chains == (("p00002", "p00004", "p00006", "p00001"), ("p00003", "p00005", "p00000"))
    assert plan.leaves == {"p00000", "p00001"}


def test_leaves_alone_are_fed_by_the_hub() -> None:
    plan = make_plan(fleet(5, leaf=True), 200 * MBIT, epoch=(1, 1))
    assert set(plan.parent.values()) == {ROOT}


def test_more_leaves_than_tails_take_second_places_beside_leaves_first() -> None:
    members = [replace(m, leaf=i > 2) for i, m in enumerate(fleet(8))]
    plan = make_plan(members, 100 * MBIT, epoch=(1, 1))
    validate(plan, members)
    assert plan.children("p00002") == ("p00003", "p00004")
    assert plan.children(ROOT) == ("p00000", "p00007")


def test_equal_peers_are_ordered_by_region() -> None:
    members = [PlanMember(f"p{i}", ("eu", "us", "ap")[i % 3], score=80.0) for i in range(9)]
    plan = make_plan(members, 100 * MBIT, epoch=(1, 1))
    regions = [members[int(p[1:])].region for p in plan.chains[0]]
    assert regions == ["eu"] * 3 + ["us"] * 3 + ["ap"] * 3


def test_a_region_is_not_kept_together_where_that_would_hold_others_up() -> None:
    members = [
        PlanMember("a", "eu", 100e6, 90),
        PlanMember("b", "us", 100e6, 80),
        PlanMember("c", "us", 100e6, 70),
        PlanMember("d", "eu", 80e6, 60),
    ]
    assert make_plan(members, 100 * MBIT, epoch=(1, 1)).chains == (("a", "b", "c", "d"),)
    near_in_time = BroadcastNetwork(far_rtt_s=30.0)
    assert make_plan(members, 100 * MBIT, epoch=(1, 1), network=near_in_time, most=1).chains == (("a", "d", "b", "c"),)


@settings(deadline=None)
@given(memberships(), UPLINKS, st.randoms(use_true_random=False))
def test_a_plan_holds_every_member_once_in_any_order(
    members: list[PlanMember], uplink: float, shuffle: random.Random
) -> None:
    plan = make_plan(members, uplink, epoch=(1, 1))
    validate(plan, members)
    chained = [peer for chain in plan.chains for peer in chain]
    assert sorted(chained) == [m.id for m in members]
    shuffle.shuffle(members)
    assert make_plan(members, uplink, epoch=(1, 1)) == plan


@settings(deadline=None)
@given(memberships(), UPLINKS)
def test_a_plan_stays_when_nothing_has_changed(members: list[PlanMember], uplink: float) -> None:
    plan = make_plan(members, uplink, epoch=(1, 1))
    assert make_plan(members, uplink, epoch=(1, 1), previous=plan) is plan


@settings(deadline=None)
@given(memberships(), memberships(), UPLINKS, UPLINKS)
def test_a_replan_settles_at_once_and_is_never_much_worse_than_a_fresh_one(
    before: list[PlanMember], after: list[PlanMember], uplink: float, new_uplink: float
) -> None:
    old = make_plan(before, uplink, epoch=(1, 1))
    new = make_plan(after, new_uplink, epoch=(1, 2), previous=old)
    validate(new, after)
    assert make_plan(after, new_uplink, epoch=(1, 3), previous=new) is new
    fresh = make_plan(after, new_uplink, epoch=(1, 2))
    costs = [predict(p, after, PAYLOAD, new_uplink).cost_s for p in (new, fresh)]
    assert costs[0] <= 1.1 * (1 + 1e-9) * costs[1]


def test_noise_in_scores_and_rates_moves_no_peer() -> None:
    members = fleet(12)
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1))
    noisy = [
        replace(m, score=100.0 - m.score, bps=(97 + i % 5) * MBIT) for i, m in enumerate(members) if m.score is not None
    ]
    assert make_plan(noisy, 300 * MBIT, epoch=(1, 2), previous=plan) is plan


def test_newcomers_go_to_the_shortest_tails_and_displace_no_peer() -> None:
    members = fleet(7)
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1))
    joined = [
        *members,
        PlanMember("new-1", bps=100 * MBIT, score=100.0),
        PlanMember("new-2", bps=100 * MBIT, score=99.9),
    ]
    new = make_plan(joined, 300 * MBIT, epoch=(1, 2), previous=plan)
    assert moves(plan, new) == [("new-1", "p00004"), ("new-2", "p00005")]
    assert new.epoch == (1, 2)


def test_chains_are_begun_as_peers_arrive() -> None:
    plan = make_plan([], 300 * MBIT, epoch=(1, 0))
    members = fleet(5)
    for n in range(1, 6):
        plan = make_plan(members[:n], 300 * MBIT, epoch=(1, n), previous=plan)
    assert plan.chains == (("p00000", "p00003"), ("p00001", "p00004"), ("p00002",))


def test_departed_peers_are_cut_out_and_only_their_children_move() -> None:
    members = fleet(9)
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1))
    left = [m for m in members if m.id != "p00003"]
    new = make_plan(left, 300 * MBIT, epoch=(1, 2), previous=plan)
    assert moves(plan, new) == [("p00006", "p00000")]


def test_a_peer_turned_slow_goes_to_a_tail_and_its_child_moves_up() -> None:
    members = fleet(9)
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1))
    slowed = [replace(m, bps=10 * MBIT) if m.id == "p00003" else m for m in members]
    new = make_plan(slowed, 300 * MBIT, epoch=(1, 2), previous=plan)
    assert moves(plan, new) == [("p00006", "p00000"), ("p00003", "p00006")]


def test_a_forwarder_turned_leaf_goes_to_a_tail() -> None:
    members = fleet(9)
    plan = make_plan(members, 300 * MBIT, epoch=(1, 1))
    turned = [replace(m, leaf=True) if m.id == "p00000" else m for m in members]
    new = make_plan(turned, 300 * MBIT, epoch=(1, 2), previous=plan)
    assert moves(plan, new) == [("p00003", ROOT), ("p00000", "p00006")]


def test_an_uplink_that_shrank_merges_chains_by_moving_their_heads() -> None:
    members = fleet(12)
    plan = make_plan(members, 600 * MBIT, epoch=(1, 1))
    new = make_plan(members, 300 * MBIT, epoch=(1, 2), previous=plan)
    assert len(moves(plan, new)) == 3
    assert sorted(map(len, new.chains)) == [4, 4, 4]


def test_chains_grow_apart_only_until_time_says_so() -> None:
    members = fleet(40)
    one = Plan((1, 1), {m.id: members[i - 1].id if i else ROOT for i, m in enumerate(members)})
    new = make_plan(members, 400 * MBIT, epoch=(1, 2), previous=one, payload_bytes=1 << 20)
    assert [len(c) for c in new.chains] == [10] * 4
    assert len(moves(one, new)) == 3
    assert predict(new, members, 1 << 20, 400 * MBIT).last_s < predict(one, members, 1 << 20, 400 * MBIT).last_s / 1.1
    assert make_plan(members, 400 * MBIT, epoch=(1, 2), previous=one, payload_bytes=1 << 34) is one


def test_a_slow_peer_and_too_many_chains_are_both_repaired_by_the_fewest_moves() -> None:
    members = fleet(12)
    plan = make_plan(members, 600 * MBIT, epoch=(1, 1))
    slowed = [replace(m, bps=20 * MBIT) if m.id == "p00000" else m for m in members]
    new = make_plan(slowed, 300 * MBIT, epoch=(1, 2), previous=plan)
    validate(new, slowed)
    assert len(new.children(ROOT)) == 3
    assert not new.children("p00000")
    assert len(moves(plan, new)) == 4  # the slow one and three heads, its orphaned child among them


def test_a_slow_peer_does_not_hide_the_others_from_the_planner() -> None:
    """The slow peer is last in either plan, at its own rate; the others wait for it in one plan only."""
    members = [replace(m, bps=MBIT) if m.id == "p00001" else m for m in fleet(4)]
    amid = Plan((1, 1), {"p00000": ROOT, "p00001": "p00000", "p00002": "p00001", "p00003": "p00002"})
    new = make_plan(members, 100 * MBIT, epoch=(1, 2), previous=amid)
    assert new.chains == (("p00000", "p00002", "p00003", "p00001"),)
    assert time_to_last_s(new, members, PAYLOAD, 100 * MBIT) == pytest.approx(
        time_to_last_s(amid, members, PAYLOAD, 100 * MBIT), rel=0.01
    )


def test_forks_are_straightened_by_a_move_each() -> None:
    members = fleet(7)
    parent = {m.id: members[(i - 1) // 2].id if i else ROOT for i, m in enumerate(members)}
    binary = Plan((1, 1), parent)  # everyone at half rate
    new = make_plan(members, 100 * MBIT, epoch=(1, 2), previous=binary)
    assert [len(c) for c in new.chains] == [7]
    assert len(moves(binary, new)) == 3


def test_a_plan_beyond_repair_is_dealt_anew() -> None:
    members = [replace(m, leaf=i > 3) for i, m in enumerate(fleet(7))]
    tangled = Plan((1, 1), {m.id: ROOT for m in members}, frozenset(m.id for m in members if m.leaf))
    kept = make_plan(members, 100 * MBIT, epoch=(1, 2), previous=tangled, anew=False)
    new = make_plan(members, 100 * MBIT, epoch=(1, 2), previous=tangled)
    assert predict(new, members, PAYLOAD, 100 * MBIT).cost_s * 1.1 < predict(kept, members, PAYLOAD, 100 * MBIT).cost_s
    assert len(new.chains[0]) > 1


def test_ten_thousand_members() -> None:
    """Run for its own sake: anything quadratic would take minutes here. One chain is the deepest that a plan can be."""
    members = fleet(10_000)
    for uplink in (100 * MBIT, 30_000 * MBIT):
        half = make_plan(members[::2], uplink, epoch=(1, 1))
        whole = make_plan(members, uplink, epoch=(1, 2), previous=half)
        assert len(moves(half, whole)) == 5_000
        thirds = make_plan(members[::3], uplink, epoch=(1, 3), previous=whole)
        validate(thirds, members[::3])


def test_members_and_epochs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlanError, match="'a' is listed twice"):
        make_plan([PlanMember("a"), PlanMember("b"), PlanMember("a")], 1e6, epoch=(1, 1))
    for fields in ({"id": ""}, {"bps": -1.0}, {"bps": float("inf")}, {"score": float("nan")}):
        with pytest.raises(PlanError):
            PlanMember(**{"id": "a", **fields})  # type: ignore[arg-type]
    plan = make_plan([PlanMember("a")], 1e6, epoch=(2, 1))
    for stale in ((1, 9), (2, 1)):
        with pytest.raises(PlanError, match="epoch"):
            make_plan([PlanMember("b")], 1e6, epoch=stale, previous=plan)


def test_no_unsound_plan_can_be_built() -> None:
    with pytest.raises(LoopError):
        Plan((1, 1), {"a": ROOT, "b": "c", "c": "b"})
    with pytest.raises(LoopError):
        Plan((1, 1), {"a": "a"})
    with pytest.raises(PlanError, match="'x'"):
        Plan((1, 1), {"a": "x"})
    with pytest.raises(PlanError):
        Plan((1, 1), {ROOT: "a", "a": ROOT})
    with pytest.raises(ParentFullError):
        Plan((1, 1), {"a": ROOT, "b": "a", "c": "a", "d": "a"})
    with pytest.raises(ParentFullError):
        Plan((1, 1), {"a": ROOT, "b": "a"}, frozenset("a"))
    with pytest.raises(PlanError):
        Plan((1, 1), {"a": ROOT}, frozenset("b"))


def test_a_plan_answers_queries_by_peer() -> None:
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b", "d": "c", "x": "b", "y": ROOT})
    assert plan.path("d") == ("a", "b", "c", "d")
    assert plan.path(ROOT) == ()
    assert plan.backups("d") == ("b", "a", ROOT)
    assert plan.backups("d", limit=1) == ("b", ROOT)
    assert plan.backups("b") == plan.backups("a") == (ROOT,)
    assert plan.chains == (("a", "b", "c", "d"), ("y",), ("x",))
    assert (plan.depth, plan.depth_of("c"), plan.depth_of(ROOT)) == (4, 3, 0)
    assert plan.order == ("a", "y", "b", "c", "x", "d")
    assert "a" in plan
    assert "z" not in plan
    assert plan == Plan((1, 1), dict(plan.parent))
    assert hash(plan) == hash(Plan((1, 1), dict(reversed(list(plan.parent.items())))))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["eu", "us", "ap", "af"]), min_size=1, max_size=40),
    st.sampled_from([100 * MBIT, 350 * MBIT]),
)
def test_no_chain_of_equal_peers_enters_a_region_twice(regions: list[str], uplink: float) -> None:
    members = [PlanMember(f"p{i:02}", region, 100 * MBIT, 80.0) for i, region in enumerate(regions)]
    where = {m.id: m.region for m in members}
    for chain in make_plan(members, uplink, epoch=(1, 1)).chains:
        entered = [where[p] for i, p in enumerate(chain) if i == 0 or where[p] != where[chain[i - 1]]]
        assert len(entered) == len(set(entered))


@pytest.mark.parametrize(("regions", "chains"), [(5, 10), (5, 12), (3, 8), (2, 2)])
def test_regions_are_entered_no_more_often_than_there_are_chains_and_regions(regions: int, chains: int) -> None:
    """A chain through a whole region is too long here to enter each region once."""
    network = BroadcastNetwork(near_rtt_s=0.05)
    members = [replace(m, region=f"r{n * 7 % regions}", score=80.0) for n, m in enumerate(fleet(20 * chains))]
    plan = make_plan(members, (chains + 0.5) * 100 * MBIT, epoch=(1, 1), network=network)
    assert len(plan.children(ROOT)) == chains
    assert regions <= entries(plan, members) < chains + regions


def entries(plan: Plan, members: list[PlanMember], root_region: str = "") -> int:
    where = {m.id: m.region for m in members} | {ROOT: root_region}
    return sum(where[p] != where[above] for p, above in plan.parent.items() if where[p] != root_region)


CLUSTERS = [
    PlanMember(name, region, rate * MBIT)
    for name, region, rate in [
        ("o1", "ohio", 3.5),
        ("o2", "ohio", 2.4),
        ("v1", "va", 2.3),
        ("v2", "va", 3.1),
        ("f1", "eu", 2.0),
        ("f2", "eu", 2.8),
    ]
]
"""Measured rates of peers behind shared trunks."""


def test_a_region_is_entered_once_where_a_second_way_would_only_seem_to_be_free() -> None:
    plan = make_plan(CLUSTERS, 24 * MBIT, epoch=(1, 1))
    assert entries(plan, CLUSTERS) == 3
    assert dict(plan.parent) == {"o1": ROOT, "o2": "o1", "v2": ROOT, "v1": "v2", "f2": ROOT, "f1": "f2"}


def test_a_star_into_regions_is_gathered_by_a_move_for_each_way_in() -> None:
    star = Plan((1, 0), {m.id: ROOT for m in CLUSTERS})
    plan = make_plan(CLUSTERS, 24 * MBIT, epoch=(1, 1), previous=star, anew=False)
    assert moves(star, plan) == [("f1", "f2"), ("o2", "o1"), ("v1", "v2")]
    assert make_plan(CLUSTERS, 24 * MBIT, epoch=(1, 2), previous=plan) is plan


def test_a_peer_outside_its_region_is_moved_back() -> None:
    members = [replace(m, bps=8 * MBIT) for m in CLUSTERS]
    strayed = Plan((1, 0), {"o1": ROOT, "v1": "o1", "v2": "v1", "o2": ROOT})
    plan = make_plan(members[:4], 8 * MBIT, epoch=(1, 1), previous=strayed, anew=False)
    assert entries(plan, members) == 2
    assert dict(plan.parent) == {"o1": ROOT, "o2": "o1", "v1": "o2", "v2": "v1"}


def test_a_second_entry_is_used_where_a_peer_would_wait() -> None:
    """A chain of 40 small hops takes longer than what is sent."""
    members = fleet(40, region="eu")
    small = make_plan(
        members, 4000 * MBIT, epoch=(1, 1), payload_bytes=1 << 20, network=BroadcastNetwork(near_rtt_s=0.03)
    )
    assert len(small.children(ROOT)) > 1
    assert len(make_plan(members, 4000 * MBIT, epoch=(1, 1)).children(ROOT)) == 1
    slow = [replace(members[0], bps=10 * MBIT), *members[1:3]]
    plan = make_plan(slow, 400 * MBIT, epoch=(1, 1))
    assert plan.children("p00000") == ()


@pytest.mark.parametrize(("n", "regions"), [(300, 100), (1000, 200)])
def test_many_regions_are_planned_in_as_many_looks_as_there_are_regions(
    n: int, regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    members = [
        PlanMember(f"p{i:04}", f"r{i % regions}", rng.choice([25, 50, 100, 200]) * MBIT, rng.uniform(20, 100))
        for i in range(n)
    ]
    looks: list[Plan] = []

    def counted(plan: Plan, *rest: object) -> Prediction:
        looks.append(plan)
        return predict_at(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("topology.plan.predict_at", counted)
    plan = make_plan(members, 3000 * MBIT, epoch=(1, 1))
    assert len(looks) <= 2 * regions
    looks.clear()
    assert make_plan(members, 3000 * MBIT, epoch=(1, 2), previous=plan) is plan
    assert len(looks) <= 2 * regions


@settings(deadline=None)
@given(memberships(), UPLINKS, UPLINKS)
def test_a_prediction_from_another_plans_equals_one_from_nothing(
    members: list[PlanMember], uplink: float, other: float
) -> None:
    table = by_id(members)
    plans = [make_plan(members, bps, epoch=(1, 1), payload_bytes=PAYLOAD) for bps in (uplink, other)]

    def look(plan: Plan, before: tuple[Plan, Prediction] | None = None) -> Prediction:
        return predict_at(plan, table, member_rates(table), PAYLOAD, uplink, before=before)

    first, second = map(look, plans)
    assert look(plans[1], (plans[0], first)) == second
    assert look(plans[0], (plans[1], second)) == first


def test_the_hubs_own_region_and_a_number_of_chains_that_was_told_are_left_alone() -> None:
    members = fleet(6, region="eu")
    assert (
        len(make_plan(members, 350 * MBIT, epoch=(1, 1), network=BroadcastNetwork(root_region="eu")).children(ROOT))
        == 3
    )
    assert len(make_plan(members, 350 * MBIT, epoch=(1, 1), most=3).children(ROOT)) == 3


@settings(deadline=None)
@given(memberships(max_size=8), UPLINKS)
def test_where_there_are_few_no_star_and_no_single_chain_would_be_sooner(
    members: list[PlanMember], uplink: float
) -> None:
    def cost_s(plan: Plan) -> float:
        return predict(plan, members, PAYLOAD, uplink).cost_s

    # A region is entered once even where that takes longer, so the peers stand alone here.
    members = [replace(m, region="") for m in members]
    plan = make_plan(members, uplink, epoch=(1, 1))
    forwarders = [m.id for m in members if not m.leaf]
    ends = {m.id: forwarders[-1] if forwarders else ROOT for m in members if m.leaf}
    assert cost_s(plan) <= 1.1 * cost_s(Plan((1, 1), {m.id: ROOT for m in members})) + 1e-9
    if len(ends) < 2:
        line = Plan((1, 1), dict(zip(forwarders, [ROOT, *forwarders], strict=False)) | ends)
        assert cost_s(plan) <= 1.1 * cost_s(line) + 1e-9


@settings(deadline=None)
@given(memberships(), UPLINKS)
def test_leaves_feed_no_peer_in_any_plan(members: list[PlanMember], uplink: float) -> None:
    plan = make_plan(members, uplink, epoch=(1, 1))
    assert all(not plan.children(m.id) for m in members if m.leaf)
    assert plan.leaves == {m.id for m in members if m.leaf}
