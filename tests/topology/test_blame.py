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


def test_a_witness_alone_demotes_few_nodes_at_a_time():
    blame = Blame()
    names = [f"x{n}" for n in range(CREDIBLE + 1)]
    rows = [(name, 1) for name in names]
    assert blame.record("a", rows, 0.0) == names[:CREDIBLE]
    assert blame.record("a", rows, 1.0) == []
    assert blame.demoted(1.0) == set(names[:CREDIBLE]), "earlier verdicts stand"


def test_four_liars_with_one_witness_are_each_demoted():
    """The witness repeats its report. A liar that met a full witness is demoted when there is room, and each liar again
    at its next corrupt piece.
    """
    blame = Blame()
    liars = [f"x{n}" for n in range(CREDIBLE + 1)]
    demoted: set[str] = set()
    for n in range(len(liars)):
        demoted.update(blame.record("honest", [(name, 1) for name in liars[: n + 1]], float(n)))
    assert demoted == set(liars[:CREDIBLE])
    later = FORGIVEN_S + 1.0
    assert blame.record("honest", [(name, 1) for name in liars], later) == [liars[-1]]
    assert blame.record("honest", [(name, 2) for name in liars], later + FORGIVEN_S) == liars[:CREDIBLE]


def test_a_blame_that_another_witness_confirms_takes_no_room():
    blame = Blame()
    liars = [f"x{n}" for n in range(CREDIBLE + 1)]
    blame.record("a", [(name, 1) for name in liars[:CREDIBLE]], 0.0)
    blame.record("b", [(liars[0], 1)], 1.0)
    assert blame.record("a", [(liars[-1], 1)], 2.0) == [liars[-1]]
    assert blame.demoted(2.0) == set(liars)


def test_a_pair_of_witnesses_demotes_few_nodes_for_good():
    """Two nodes that lie together cannot empty the fleet, however long they try."""
    blame = Blame()
    for n in range(10 * CREDIBLE):
        for witness in "ab":
            blame.record(witness, [(f"x{n}", 1)], 2 * FORGIVEN_S * n)
    assert len(blame.demoted(1e9)) == CREDIBLE


def test_self_blame_is_ignored():
    blame = Blame()
    assert blame.record("a", [("a", 3)], 0.0) == []
    assert blame.demoted(0.0) == frozenset()


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(1, 4), st.floats(0.0, FORGIVEN_S)), max_size=40))
def test_every_demoted_node_has_a_witness_and_no_witness_alone_demotes_many(said):
    blame, words, now = Blame(), {}, 0.0
    for witness, node, pieces, pause_s in said:
        now += pause_s
        if node in blame.record(witness, [(node, pieces)], now):
            words.setdefault(node, set()).add(witness)
        demoted = blame.demoted(now)
        assert all(node in demoted for node in words if blame.quarantined(node))
        assert demoted <= words.keys()
        assert all(len(words[node]) == blame.witnesses(node) for node in words)
        alone = [next(iter(words[node])) for node in demoted if len(words[node]) < WITNESSES]
        assert all(alone.count(name) <= CREDIBLE for name in "abcdefgh")


def test_memory_per_witness_is_bounded():
    blame = Blame()
    for n in range(1000):
        blame.record("liar", [(f"x{n}-{m}", 1) for m in range(10)], float(n))
    assert len(blame._counts["liar"]) <= 2 * CREDIBLE
    assert len(blame._believed) <= 2 * CREDIBLE
