"""Whom the hub names to one that lacks something."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.sources import PARTIAL, WHOLE, Sources

A, B = b"a", b"b"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 120))
def test_who_is_named_is_there_and_has_it_or_pulls_it(seed, events):
    draw = random.Random(seed)
    sources, held, parts, peers = Sources(), {}, {}, [f"p{n}" for n in range(12)]
    for _ in range(events):
        peer, artifact = draw.choice(peers), draw.choice([A, B])
        what = draw.random()
        if what < 0.35:
            sources.holds(peer, [artifact])
            held.setdefault(artifact, set()).add(peer)
            parts.get(artifact, set()).discard(peer)
        elif what < 0.45:
            sources.holds(peer, [], [artifact])
            held.get(artifact, set()).discard(peer)
        elif what < 0.55:
            sources.left(peer)
            for table in (held, parts):
                for some in table.values():
                    some.discard(peer)
        else:
            without = draw.sample(peers, 2)
            found = sources.seek(peer, artifact, without)
            assert not set(found) & {peer, *without}
            assert set(found) <= held.get(artifact, set()) | parts.get(artifact, set())
            able = (held.get(artifact, set()) | parts.get(artifact, set())) - {peer, *without}
            assert bool(found) == bool(able)
            assert len(found) <= WHOLE + PARTIAL
            parts.setdefault(artifact, set()).add(peer)
        assert all(sources.serves(p) >= 0 for p in peers)


def test_load_spreads_over_all_who_hold_it():
    sources = Sources()
    for n in range(1000):
        sources.holds(f"holder{n}", [A])
    for n in range(400):
        sources.seek(f"late{n}", A)
    serves = [sources.serves(f"holder{n}") for n in range(1000)]
    assert max(serves) == WHOLE * 400 // 1000
    for n in range(400):
        sources.holds(f"late{n}", [A])
    assert not any(sources.serves(f"holder{n}") for n in range(1000)), "who is done counts no more"


def test_the_own_region_where_load_is_equal():
    sources = Sources()
    for n in range(20):
        sources.holds(f"{'far' if n % 2 else 'near'}{n}", [A])
    found = sources.seek("late", A, near=lambda peer: peer.startswith("near"))
    assert all(peer.startswith("near") for peer in found)


def test_those_who_pull_find_each_other():
    sources = Sources()
    assert sources.seek("x", A) == []
    assert sources.seek("y", A) == ["x"]
    assert sources.seek("x", A) == ["y"]
    sources.left("y")
    assert sources.seek("x", A) == []


def test_nothing_is_left_of_what_is_gone():
    sources = Sources()
    sources.holds("a", [A, B])
    sources.seek("b", A)
    sources.seek("c", A)
    assert sources.serves("a") == 2
    sources.gone(A)
    assert sources.serves("a") == 0
    assert sources.seek("d", A) == []
    assert sources.seek("d", B) == ["a"]
    sources.gone(A)
    sources.left("a")
    sources.left("d")
    sources.gone(B)
    assert not any([sources._whole, sources._parts, sources._held, sources._named, +sources._serves])
