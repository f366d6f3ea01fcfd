"""The sources that the hub names to a peer that lacks an artifact."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.pull_sources import MOST_HELD, MOST_SOUGHT, PARTIAL, WHOLE, PullSources

A, B = b"a", b"b"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 120))
def test_named_sources_hold_or_pull_the_artifact(seed, events):
    draw = random.Random(seed)
    sources, held, parts, peers = PullSources(), {}, {}, [f"p{n}" for n in range(12)]
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


def test_load_spreads_over_all_holders():
    sources = PullSources()
    for n in range(1000):
        sources.holds(f"holder{n}", [A])
    for n in range(400):
        sources.seek(f"late{n}", A)
    serves = [sources.serves(f"holder{n}") for n in range(1000)]
    assert max(serves) == WHOLE * 400 // 1000
    for n in range(400):
        sources.holds(f"late{n}", [A])
    assert not any(sources.serves(f"holder{n}") for n in range(1000)), "who is done counts no more"


def test_sources_in_the_own_region_come_first_at_equal_load():
    sources = PullSources()
    for n in range(20):
        sources.holds(f"{'far' if n % 2 else 'near'}{n}", [A])
    found = sources.seek("late", A, near=lambda peer: peer.startswith("near"))
    assert all(peer.startswith("near") for peer in found)


def test_pulling_peers_are_named_to_each_other():
    sources = PullSources()
    assert sources.seek("x", A) == []
    assert sources.seek("y", A) == ["x"]
    assert sources.seek("x", A) == ["y"]
    sources.left("y")
    assert sources.seek("x", A) == []


def test_records_of_one_peer_are_bounded():
    """A peer may name artifacts that do not exist: its records stay bounded."""
    sources = PullSources()
    names = [n.to_bytes(16) for n in range(3 * MOST_HELD)]
    for at in range(0, len(names), 1000):
        sources.holds("a", names[at : at + 1000])
    assert len(sources._held["a"]) == len(sources._whole) == MOST_HELD
    for name in names:
        sources.seek("a", name)
    assert len(sources._parts) == len(sources._named) == len(sources._sought["a"]) == MOST_SOUGHT
    sources.holds("b", [names[0]])
    assert sources.seek("c", names[0]) == ["a", "b"]
    for peer in "abc":
        sources.left(peer)
    left = [sources._held, sources._whole, sources._parts, sources._named, sources._sought, +sources._serves]
    assert not any(left)


def test_departed_peers_and_artifacts_leave_no_records():
    sources = PullSources()
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
