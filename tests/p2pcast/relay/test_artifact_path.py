"""cheapest_path against every possible path."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, cheapest_path

VERSION = st.builds(Version, st.integers(0, 1), st.integers(0, 4))


@st.composite
def graphs(draw):
    edges = []
    for n in range(draw(st.integers(0, 9))):
        version = draw(VERSION)
        base = draw(st.none() | VERSION)
        if base is None or base < version:
            edges.append(Edge(bytes([n]), base, version, draw(st.integers(0, 5))))
    return edges


def every_path(held, edges):
    """All paths from the held version: first an anchor, or a delta on that version, then deltas."""
    found = [[]]
    stack = [[e] for e in edges if e.base is None or e.base == held]
    while stack:
        path = stack.pop()
        found.append(path)
        stack += [[*path, e] for e in edges if e.base == path[-1].version]
    return found


@given(st.none() | VERSION, graphs())
def test_the_cheapest_path_matches_brute_force(held, edges):
    path = cheapest_path(held, edges)
    ways = every_path(held, edges)
    ends = [way[-1].version for way in ways if way] + ([] if held is None else [held])
    newest = max(ends, default=None)
    assert path in ways
    assert (path[-1].version if path else held) == newest
    if newest != held:
        best = min((sum(e.bytes for e in w), len(w)) for w in ways if w and w[-1].version == newest)
        assert (sum(e.bytes for e in path), len(path)) == best
    else:
        assert path == []
