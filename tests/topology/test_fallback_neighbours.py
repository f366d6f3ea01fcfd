"""Neighbours when all ancestors are dead: the remaining orphans always form one ring."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.fallback_neighbours import affected_peers, neighbours_of
from topology.plan import make_plan
from topology.plan_changes import admit, adopt, excise
from topology.plan_tree import MAX_CHILDREN, ROOT, Plan, PlanError, PlanMember


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 12))
    parent: dict[str, str] = {}
    for number in range(count):
        open_ = [ROOT, *(p for p in parent if list(parent.values()).count(p) < MAX_CHILDREN)]
        parent[f"{number:02}"] = draw(st.sampled_from(open_))
    return Plan((1, 1), parent)


@given(plans(), st.data())
def test_orphans_form_one_ring(plan, data):
    alive = data.draw(st.sets(st.sampled_from(sorted(plan.parent)), min_size=1))
    beside = {p: neighbours_of(plan, p, limit=len(plan)) for p in plan.parent}
    orphans = [p for p in alive if not alive & set(plan.path(p)[:-1])]
    following = {p: next((n for n in beside[p] if n in alive), None) for p in orphans}
    at, seen = orphans[0], []
    while at not in seen:
        seen.append(at)
        at = following[at] or at
    assert at == orphans[0]
    assert sorted(seen) == sorted(orphans)


@given(plans())
def test_no_fallback_parent_is_above_or_below(plan):
    for peer in plan.parent:
        for other in neighbours_of(plan, peer):
            assert peer not in plan.path(other)
            assert other not in plan.path(peer)


def test_the_next_chain_from_its_head_down_and_round():
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": ROOT, "f": ROOT}, leaves=frozenset({"e"}))
    found = {p: neighbours_of(plan, p, limit=3) for p in plan.parent}
    assert found["a"] == found["b"] == ("c", "d", "f")
    assert found["c"] == found["d"] == ("f", "a", "b")
    assert found["f"] == ("a", "b", "c")


def test_one_chain_has_no_neighbours():
    parent = {"000": ROOT} | {f"{n:03}": f"{n - 1:03}" for n in range(1, 300)}
    plan = Plan((1, 1), parent)
    assert {neighbours_of(plan, p) for p in parent} == {()}


def orders(plan: Plan, backups: int) -> dict[str, object]:
    """Each peer's parent, backups and neighbours."""
    return {p: (plan.parent[p], plan.backups(p, backups), neighbours_of(plan, p)) for p in plan.parent}


@given(plans(), st.data())
def test_only_affected_peers_change(plan, data):
    """A peer dies, joins, moves or becomes a leaf: nothing changes for peers outside `affected_peers`."""
    before = plan
    touched: set[str] = set()
    for change in data.draw(st.lists(st.sampled_from(["die", "come", "move", "leaf"]), min_size=1, max_size=3)):
        names = sorted(plan.parent)
        if not names:
            break
        peer = data.draw(st.sampled_from(names))
        try:
            if change == "die":
                touched |= {peer, *plan.children(peer)}
                plan = excise(plan, [peer], epoch=(1, plan.epoch[1] + 1))
            elif change == "come":
                touched.add(f"new {len(touched)}")
                plan = admit(
                    plan,
                    PlanMember(f"new {len(touched) - 1}"),
                    chains=data.draw(st.integers(1, 4)),
                    epoch=(1, plan.epoch[1] + 1),
                )
            elif change == "move":
                touched.add(peer)
                plan = adopt(plan, peer, data.draw(st.sampled_from([ROOT, *names])), epoch=(1, plan.epoch[1] + 1))
            elif not plan.children(peer):
                touched.add(peer)
                plan = plan.changed((1, plan.epoch[1] + 1), {}, leaves=plan.leaves ^ {peer})
        except PlanError:
            continue
    backups = data.draw(st.integers(0, 3))
    was, now = orders(before, backups), orders(plan, backups)
    assert {p for p, told in now.items() if was.get(p) != told} <= affected_peers(before, plan, touched)


def test_one_change_affects_few_of_ten_thousand_peers():
    members = [PlanMember(f"{n:05}", f"r{n % 5}") for n in range(10_000)]
    plan = make_plan(members, 300 * 100e6, epoch=(1, 1))
    dead = plan.chains[7][11]
    after = excise(plan, [dead], epoch=(1, 2))
    assert len(affected_peers(plan, after, {dead, *plan.children(dead)})) < 120
