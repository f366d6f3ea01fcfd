"""The ladder: rungs nest, chain, are made once, and shorten every path."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.store.squash_ladder import RUNGS, missing_rungs

RUNG_SETS = st.sampled_from([(8, 64), (2, 4, 8), (3,), (4, 16), ()])


def path_of(count, first=0):
    return [Version(0, 10 * n) for n in range(first, first + count)]


def spans(rungs):
    return [(r.base, r.version) for r in rungs]


def test_rungs_of_seventeen_versions():
    path = path_of(17)
    assert missing_rungs(path[:4], [], (4, 8)) == []
    two = missing_rungs(path, [], (4, 8))
    assert spans(two) == [(path[n], path[n + 4]) for n in (0, 4, 8, 12)] + [(path[0], path[8]), (path[8], path[16])]
    assert two[0].parts == tuple(pairwise(path[:5]))
    assert two[4].parts == ((path[0], path[4]), (path[4], path[8]))


@given(steps=st.lists(st.integers(1, 40), min_size=1, max_size=8), rungs=RUNG_SETS)
@settings(max_examples=80, deadline=None)
def test_ladder_is_independent_of_its_time_of_building(steps, rungs):
    made, total = [], 1
    for step in steps:
        total += step
        fresh = missing_rungs(path_of(total), made, rungs)
        assert not set(spans(fresh)) & set(made)
        made += spans(fresh)
    assert sorted(made) == sorted(spans(missing_rungs(path_of(total), [], rungs)))
    assert missing_rungs(path_of(total), made, rungs) == []


@given(total=st.integers(1, 200), rungs=RUNG_SETS)
@settings(max_examples=60, deadline=None)
def test_parts_chain_and_precede_their_rung(total, rungs):
    path = path_of(total)
    there = set(pairwise(path))
    for rung in missing_rungs(path, [], rungs):
        assert set(rung.parts) <= there
        assert [rung.base, *(v for _, v in rung.parts)] == [*(b for b, _ in rung.parts), rung.version]
        there.add((rung.base, rung.version))


@given(lost=st.integers(0, 64), more=st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_rungs_stay_in_place_when_old_versions_are_removed(lost, more):
    made = spans(missing_rungs(path_of(151), []))
    kept = path_of(151 + more - lost, lost)
    fresh = missing_rungs(kept, made)
    wanted = spans(missing_rungs(path_of(151 + more), []))
    assert [s for s in spans(fresh) if s not in wanted] == []
    assert {s for s in wanted if s[0] >= kept[0]} <= {*made, *spans(fresh)}


def test_rung_without_its_base_does_not_stop_the_ladder():
    made = spans(missing_rungs(path_of(151), [], (8, 64)))
    kept = path_of(140, 65)
    fresh = spans(missing_rungs(kept, made, (8, 64)))
    assert (kept[72 - 65], kept[136 - 65]) in fresh
    assert missing_rungs(kept, made + fresh, (8, 64)) == []


@given(behind=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_late_peer_needs_few_artifacts(behind):
    path = path_of(201)
    chain = [(a, b, 10) for a, b in pairwise(path)]
    weight = dict(zip(RUNGS, (25, 75, 200), strict=True))
    rungs = [(*span, weight[path.index(span[1]) - path.index(span[0])]) for span in spans(missing_rungs(path, []))]
    edges = [
        Edge(n.to_bytes(2, "big"), base, version, size) for n, (base, version, size) in enumerate([*chain, *rungs])
    ]
    way = cheapest_path(path[200 - behind], edges)
    assert way[-1].version == path[-1]
    assert len(way) <= sum(2 * (b // a - 1) for a, b in pairwise((1, *RUNGS))) + behind // RUNGS[-1]
    assert sum(e.bytes for e in way) <= 10 * behind


def test_squashes_off_the_path_are_ignored():
    path = path_of(9)
    assert spans(missing_rungs(path, [(Version(1, 0), path[3]), (path[2], Version(7, 7))], (8,))) == [
        (path[0], path[8])
    ]


@pytest.mark.parametrize("rungs", [(8, 8), (8, 4), (8, 20), (1, 2), (0,)])
def test_rungs_that_do_not_nest_are_refused(rungs):
    with pytest.raises(UsageError, match="do not nest"):
        missing_rungs(path_of(3), [], rungs)
