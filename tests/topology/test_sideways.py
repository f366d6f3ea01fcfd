"""Who turns to whom when all above are dead: whatever dies, the orphans that are left form one ring."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.sideways import sideways
from topology.tree import MAX_CHILDREN, ROOT, Plan


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
    beside = sideways(plan, limit=len(plan))
    orphans = [p for p in alive if not alive & set(plan.path(p)[:-1])]
    following = {p: next((n for n in beside[p] if n in alive), None) for p in orphans}
    at, seen = orphans[0], []
    while at not in seen:
        seen.append(at)
        at = following[at] or at
    assert at == orphans[0]
    assert sorted(seen) == sorted(orphans)


@given(plans())
def test_nobody_turns_to_those_above_or_below(plan):
    for peer, others in sideways(plan).items():
        for other in others:
            assert peer not in plan.path(other)
            assert other not in plan.path(peer)


def test_the_next_chain_from_its_head_down_and_round():
    plan = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": ROOT, "f": ROOT}, leaves=frozenset({"e"}))
    found = sideways(plan, limit=3)
    assert found["a"] == found["b"] == ("c", "d", "f")
    assert found["c"] == found["d"] == ("f", "a", "b")
    assert found["f"] == ("a", "b", "c")


def test_one_chain_has_nobody_beside_it():
    parent = {"000": ROOT} | {f"{n:03}": f"{n - 1:03}" for n in range(1, 300)}
    assert set(sideways(Plan((1, 1), parent)).values()) == {()}
