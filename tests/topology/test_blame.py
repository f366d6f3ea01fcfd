"""Credibility of reports about corrupt pieces, and their consequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.blame import CREDIBLE, FORGIVEN_S, WITNESSES, Blame

NAMES = st.sampled_from("abcdefgh")


def test_one_witness_is_believed_for_a_while_and_two_for_good():
    blame = Blame()
    assert blame.record("a", [("x", 1)], 0.0) == ["x"]
    assert blame.demoted(1.0) == {"x"}
    assert not blame.quarantined("x")
    assert blame.record("a", [("x", 1)], 2.0) == [], "said again is not done again"
    assert blame.demoted(FORGIVEN_S + 1) == frozenset()
    assert blame.record("a", [("x", 2)], 1000.0) == ["x"]
    assert blame.demoted(1001.0) == {"x"}
    assert blame.record("b", [("x", 7)], 1002.0) == ["x"]
    assert blame.quarantined("x")
    assert blame.demoted(1e9) == {"x"}


def test_a_witness_that_blames_every_peer_is_not_credible():
    blame = Blame()
    names = [f"x{n}" for n in range(CREDIBLE + 1)]
    for n, name in enumerate(names):
        blame.record("liar", [(name, 1)], float(n))
    assert blame.demoted(10.0) == frozenset()
    assert blame.record("liar", [("y", 1)], 11.0) == []


def test_self_blame_is_ignored():
    blame = Blame()
    assert blame.record("a", [("a", 3)], 0.0) == []
    assert blame.demoted(0.0) == frozenset()


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(1, 4)), max_size=40))
def test_every_muted_node_has_a_credible_witness(said):
    blame, words = Blame(), {}
    for now, (witness, node, pieces) in enumerate(said):
        blame.record(witness, [(node, pieces)], float(now))
        if witness != node:
            words.setdefault(witness, set()).add(node)
    believed = [nodes for nodes in words.values() if len(nodes) <= CREDIBLE]
    for node in "abcdefgh":
        count = sum(node in nodes for nodes in believed)
        assert blame.quarantined(node) == (count >= WITNESSES)
        assert (node in blame.demoted(float(len(said)))) == (count > 0)


def test_memory_per_witness_is_bounded():
    blame = Blame()
    for n in range(1000):
        blame.record("liar", [(f"x{n}-{m}", 1) for m in range(10)], float(n))
    assert len(blame._counts["liar"]) <= 10
    assert not blame._last_s
