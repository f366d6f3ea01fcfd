"""Demotion of unreliable peers step by step, their return, and that plans still converge."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.broadcast_time import predict
from topology.plan import make_plan
from topology.plan_changes import GAMMA, misplaced, validate
from topology.plan_tree import ROOT, Plan, PlanMember
from topology.score_demotion import BACK, STEPS, Standing, Standings
from topology.slow_peers import SUSTAINED

GOOD = dict.fromkeys("abcde", 100.0)


def looked(standings: Standings, times: int, **reliable: float | None) -> Standing:
    for _ in range(times):
        standings.update(GOOD | reliable)
    return standings.of("x")


def test_standing_falls_and_rises_step_by_step():
    standings = Standings()
    assert looked(standings, SUSTAINED - 1, x=10.0) is Standing.HEAD
    for step in (Standing.MIDDLE, Standing.TAIL, Standing.LEAF):
        looked(standings, 1, x=10.0)
        assert standings.of("x") is step
        looked(standings, SUSTAINED - 1, x=10.0)
    assert standings.leaves == {"x"}
    assert looked(standings, 20, x=10.0) is Standing.LEAF
    for step in (Standing.TAIL, Standing.MIDDLE, Standing.HEAD):
        assert looked(standings, SUSTAINED, x=100.0) is step
    assert not standings._steps
    assert all(standings.of(peer) is Standing.HEAD for peer in GOOD)


def test_standing_follows_reliability():
    for reliable, step in ((95.0, 0), (88.0, 1), (75.0, 2), (60.0, 3)):
        assert looked(Standings(), 20 * SUSTAINED, x=reliable) == step


def test_once_in_a_while_costs_nothing():
    standings = Standings()
    for _ in range(20):
        looked(standings, SUSTAINED - 1, x=10.0)
        assert looked(standings, 1, x=100.0) is Standing.HEAD


def test_a_fault_of_all_peers_demotes_none():
    standings = Standings()
    for _ in range(20):
        standings.update(dict.fromkeys("abcdef", 30.0))
    assert not standings._steps


def test_absent_and_unmeasured_peers_keep_their_standing():
    standings = Standings()
    looked(standings, SUSTAINED, x=10.0)
    standings.update(GOOD)
    assert looked(standings, 5, x=None) is Standing.MIDDLE
    standings.forget("x")
    assert standings.of("x") is Standing.HEAD
    assert not standings._held


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0, 100))
def test_a_constant_record_settles(values, steady):
    standings = Standings()
    for value in values:
        looked(standings, 1, x=value)
    looked(standings, 10 * SUSTAINED, x=steady)
    settled = standings.of("x")
    looked(standings, 3 * SUSTAINED, x=steady)
    assert standings.of("x") is settled
    if settled < Standing.LEAF:
        assert steady * STEPS[settled] >= 100
    if settled > Standing.HEAD:
        assert steady * STEPS[settled - 1] <= 100 * BACK


def members(standings, rates=None, leaf=frozenset()):
    return [
        PlanMember(f"p{n}", bps=(rates or [1e8] * len(standings))[n], score=90.0, leaf=n in leaf, standing=standing)
        for n, standing in enumerate(standings)
    ]


def chain(*peers: str) -> Plan:
    return Plan((1, 1), dict(zip(peers, (ROOT, *peers), strict=False)))


def test_failing_heads_and_worse_middles_move_to_the_tail():
    before = chain("p0", "p1", "p2")
    kept = make_plan(members([0, 1, 0]), 1.5e8, epoch=(1, 2), previous=before, most=1)
    assert kept is before, "it heads nothing"
    lowered = make_plan(members([1, 0, 0]), 1.5e8, epoch=(1, 2), previous=before, most=1)
    assert lowered.chains == (("p1", "p2", "p0"),)
    assert make_plan(members([1, 0, 0]), 1.5e8, epoch=(1, 3), previous=lowered, most=1) is lowered
    tail = make_plan(members([0, 2, 0]), 1.5e8, epoch=(1, 2), previous=before, most=1)
    assert tail.chains == (("p0", "p2", "p1"),)


def test_demotion_delays_no_peer():
    """The only peer that may feed others keeps its place at any number of failures, until it feeds no peer at all."""
    everybody = members([2, 0, 0], leaf={1, 2})
    before = make_plan(members([0, 0, 0], leaf={1, 2}), 1.5e8, epoch=(1, 1))
    assert before.parent["p0"] == ROOT
    assert make_plan(everybody, 1.5e8, epoch=(1, 2), previous=before) is before


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_with_poor_standings_settle_reach_all_and_cost_no_time(data):
    count = data.draw(st.integers(1, 14))
    rates = data.draw(st.lists(st.sampled_from([2e7, 8e7, 1e8, 1.2e8, 4e8]), min_size=count, max_size=count))
    leaf = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    uplink = data.draw(st.sampled_from([1.1e8, 3e8, 1e9]))
    good = members([0] * count, rates, leaf)
    plan = make_plan(good, uplink, epoch=(1, 1))
    standing = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=count, max_size=count))
    poor = members(standing, rates, leaf)
    for epoch in range(2, 30):
        following = make_plan(poor, uplink, epoch=(1, epoch), previous=plan)
        validate(following, poor)
        if following is plan:
            break
        plan = following
    else:
        raise AssertionError("the plan never settles")
    slowest = max(predict(make_plan(good, uplink, epoch=(1, 1)), good, 64 << 20, uplink).cost_s, 1e-9)
    assert predict(plan, poor, 64 << 20, uplink).cost_s <= slowest * GAMMA * GAMMA
    assert plan == make_plan(list(reversed(poor)), uplink, epoch=(2, 0), previous=plan)


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 12), st.data())
def test_among_equals_poor_standing_is_never_in_front(count, data):
    standing = data.draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=count, max_size=count))
    plan = make_plan(members([0] * count), 1.5e8, epoch=(1, 1))
    poor = members(standing)
    for epoch in range(2, 30):
        plan = make_plan(poor, 1.5e8, epoch=(1, epoch), previous=plan)
    assert misplaced(plan, {m.id: m for m in poor}) == []
