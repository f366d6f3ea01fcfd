"""Which way a late peer takes, and when it asks for one of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, PathRates, expected_bytes, fitted_exponent, seconds
from p2pcast.wire import messages
from rollout_node.sync.catchup_choice import CatchupChoice

GB = 10**9


def v(step):
    return Version(0, step)


def delta(base, step, size):
    return Edge(b"%d-%d" % (base, step), v(base), v(step), size)


CHAIN = [delta(n, n + 1, 80_000_000) for n in range(40)]
ANCHOR = Edge(b"anchor", None, v(38), 16 * GB)


def names(way):
    return [e.artifact.decode() for e in way]


def test_the_quickest_way_depends_on_the_link():
    """A chain of deltas by a narrow link, the anchor behind a wide one; the value of a squash is between the two."""
    edges = [*CHAIN, ANCHOR, delta(0, 32, 900_000_000)]
    peer = CatchupChoice("kept", 16)
    assert names(peer.way(v(0), edges, 16 * GB))[0] == "0-32"
    assert names(CatchupChoice("none", 16).way(v(0), edges, 16 * GB))[0] == "0-1"
    assert names(peer.way(None, edges, 16 * GB))[0] == "anchor"
    for _ in range(8):
        peer.transferred(10**9, 0.001)
    slow = CatchupChoice("kept", 1)
    for _ in range(8):
        slow.transferred(10 * GB, 0.1)
    assert names(slow.way(v(0), [*CHAIN, ANCHOR], 16 * GB))[0] == "anchor", (
        "40 passes over the state take longer than one fill"
    )


def test_held_artifacts_cost_no_bytes():
    half = [delta(0, 2, 0), delta(0, 1, 10**8), delta(1, 2, 10**8)]
    assert names(CatchupChoice("kept", 8).way(v(0), half, GB)) == ["0-2"]


def test_a_squash_that_saves_time_is_requested_once():
    peer = CatchupChoice("auto", 8)
    assert peer.should_ask(v(0), CHAIN, 16 * GB) == v(0)
    assert peer.should_ask(v(0), CHAIN[:1], 16 * GB) is None
    assert peer.should_ask(None, CHAIN, 16 * GB) is None
    assert peer.should_ask(v(0), [delta(n, n + 1, 100) for n in range(4)], 1000) is None, "nothing to gain"
    assert CatchupChoice("ask", 8).should_ask(v(0), [delta(n, n + 1, 100) for n in range(4)], 1000) == v(0)
    for mode in ("none", "kept"):
        assert CatchupChoice(mode, 8).should_ask(v(0), CHAIN, 16 * GB) is None
    peer.asked(v(0), 0.0)
    assert peer.should_ask(v(0), CHAIN, 16 * GB) is None


def answer(version, size=900_000_000, wait_s=5.0):
    return messages.Squashing(v(0), version, size, int(wait_s * 1e6))


def test_a_peer_waits_for_a_squash_only_while_faster():
    peer = CatchupChoice("auto", 8)
    peer.asked(v(0), 0.0)
    assert peer.waits(v(0), CHAIN, 16 * GB, 1.0), "for the answer"
    assert not peer.waits(v(0), CHAIN, 16 * GB, 3.0), "which does not come"
    peer.answered(answer(v(40)), 3.0)
    assert peer.waits(v(0), CHAIN, 16 * GB, 3.0)
    assert peer.waits(v(0), CHAIN, 16 * GB, 19.0)
    assert not peer.waits(v(0), CHAIN, 16 * GB, 21.0), "it does not come either"
    peer.answered(answer(v(40)), 3.0)
    assert not peer.waits(v(0), [*CHAIN, delta(0, 40, 900_000_000)], 16 * GB, 4.0), "it is there"
    peer.answered(answer(v(40), wait_s=10_000.0), 3.0)
    assert not peer.waits(v(0), CHAIN, 16 * GB, 4.0), "making it takes longer than going without"
    peer.answered(answer(None), 3.0)
    assert not peer.waits(v(0), CHAIN, 16 * GB, 4.0), "there will be none"


def test_expected_sizes_follow_earlier_squashes():
    assert fitted_exponent([]) == pytest.approx(0.3)
    assert fitted_exponent([(4, 0.7), (16, 0.25)]) == pytest.approx(0.5)
    assert expected_bytes(4000, 16, 0.5) == 1000


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=12), st.floats(1e5, 1e11), st.integers(1, 10**11))
def test_a_way_is_never_longer_than_the_chain(sizes, bps, state_bytes):
    chain = [delta(n, n + 1, size) for n, size in enumerate(sizes)]
    rates = PathRates(link_bps=bps)
    peer = CatchupChoice("kept", 2)
    peer.transferred(10**9, 8e9 / bps)
    edges = [*chain, delta(0, len(sizes), max(sizes)), Edge(b"a", None, v(len(sizes)), state_bytes)]
    way = peer.way(v(0), edges, state_bytes)
    assert way[-1].version == v(len(sizes))
    assert seconds(way, peer.rates, state_bytes) <= seconds(chain, peer.rates, state_bytes) + 1e-9
    assert rates.seconds(chain[0], state_bytes) > 0
