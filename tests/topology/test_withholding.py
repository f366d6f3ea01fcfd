"""Which peer is to blame when several wait for one version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.blame import CREDIBLE, FORGIVEN_S
from topology.withholding import EXCUSES, GRACE_S, KEPT_S, Withholding

V1, V2, V3 = (bytes([n]) * 16 for n in (1, 2, 3))


def all_connected(ident: str) -> bool:
    return True


def test_a_parent_that_does_not_complain_is_to_blame_after_a_while():
    told = Withholding()
    told.record("c", [(V1, "p")], 0.0)
    assert told.judge(GRACE_S - 0.1, all_connected) == []
    assert told.judge(GRACE_S, all_connected) == [("p", "c")]
    assert told.judge(GRACE_S + 1, all_connected) == [], "said again is not judged again"
    assert told.demoted(GRACE_S + 1) == {"p"}
    assert told.demoted(GRACE_S + FORGIVEN_S) == frozenset()


def test_of_a_chain_that_waits_the_topmost_that_does_not_complain_is_to_blame():
    """In any order of reports: the child may be first."""
    told = Withholding()
    told.record("c", [(V1, "b")], 0.0)
    told.record("b", [(V1, "a")], 2.0)
    assert told.judge(GRACE_S, all_connected) == []
    assert told.judge(GRACE_S + 2, all_connected) == [("a", "b")]
    assert told.demoted(GRACE_S + 2) == {"a"}


def test_a_peer_that_always_lacks_awaited_artifacts_is_blamed_in_the_end():
    told = Withholding()
    for n in range(EXCUSES):
        artifact = bytes([n]) * 16
        told.record("p", [(artifact, None)], 10.0 * n)
        told.record("c", [(artifact, "p")], 10.0 * n)
        blamed = told.judge(10.0 * n + GRACE_S, all_connected)
        assert blamed == ([("p", "c")] if n == EXCUSES - 1 else [])


def test_one_witness_costs_a_place_for_a_while_and_two_over_two_versions_for_good():
    told = Withholding()
    told.record("c", [(V1, "p"), (V2, "p")], 0.0)
    told.judge(GRACE_S, all_connected)
    assert not told.quarantined("p")
    told = Withholding()
    told.record("c", [(V1, "p")], 0.0)
    told.record("d", [(V1, "p")], 0.0)
    told.judge(GRACE_S, all_connected)
    assert not told.quarantined("p"), "one version may be an accident"
    told.record("d", [(V2, "p")], 10.0)
    told.judge(10.0 + GRACE_S, all_connected)
    assert told.quarantined("p")
    assert told.demoted(1e9) == {"p"}


def test_a_witness_that_blames_many_is_believed_about_a_few():
    told = Withholding()
    for n in range(CREDIBLE + 1):
        told.record("liar", [(V1 if n % 2 else V2, f"p{n}")], 0.0)
        told.record("liar", [(bytes([9, n]) * 8, f"p{n}")], 0.0)
    told.judge(GRACE_S, all_connected)
    assert told.demoted(GRACE_S) == {f"p{n}" for n in range(CREDIBLE)}


def test_reports_on_departed_parents_or_the_reporter_do_not_count():
    told = Withholding()
    told.record("c", [(V1, "gone"), (V2, "c"), (V3, None)], 0.0)
    assert told.judge(GRACE_S, lambda ident: ident != "gone") == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from([V1, V2, V3]),
            st.sampled_from(["a", "b", "c", "d", None]),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_old_complaints_are_forgotten(said):
    told = Withholding()
    for witness, artifact, parent, now in sorted(said, key=lambda s: s[3]):
        told.record(witness, [(artifact, parent)], float(now))
        told.judge(float(now), all_connected)
    told.judge(10.0 + KEPT_S, all_connected)
    assert told._complaints == {}
    assert all(node in "abcd" for node in told.demoted(10.0))
