"""Who leads an engine on several hosts, and which of its members have to be told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.errors import RefusedError
from trainer_node.spans import Spans

A, B = (b"a" * 16, "host-a", 1), (b"b" * 16, "host-b", 2)
AGAIN = (b"a" * 16, "host-a", 9)


def test_members_learn_of_their_lead_whoever_comes_first():
    spans = Spans()
    spans.join("m1", "m1", ("big", "member"), B)
    assert list(spans.news()) == [("m1", "big", None)]
    spans.join("a", "a", ("big", "lead"), A)
    spans.join("m2", "m2", ("big", "member"), B)
    spans.join("x", "x", None, B)
    assert list(spans.news()) == [("m1", "big", A), ("m2", "big", A)]
    assert list(spans.news()) == []


def test_members_learn_when_it_goes_and_comes_back_elsewhere():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A)
    spans.join("m", "m", ("big", "member"), B)
    list(spans.news())
    spans.leave("a")
    assert list(spans.news()) == [("m", "big", None)]
    spans.join("a", "a", ("big", "lead"), AGAIN)
    assert list(spans.news()) == [("m", "big", AGAIN)]
    spans.join("a", "a", ("big", "lead"), A)  # without a word of farewell
    assert list(spans.news()) == [("m", "big", A)]


def test_a_member_that_joins_again_is_told_again():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A)
    for _ in range(2):
        spans.join("m", "m", ("big", "member"), B)
        assert list(spans.news()) == [("m", "big", A)]


def test_a_second_lead_is_refused_and_changes_nothing():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A)
    spans.join("b", "b", ("other", "lead"), B)
    with pytest.raises(RefusedError, match=r"engine big has a lead already: 61616161 at host-a:1; join b with --role member"):
        spans.join("b", "b", ("big", "lead"), B)
    spans.join("m", "m", ("big", "member"), B)
    spans.join("n", "n", ("other", "member"), B)
    assert list(spans.news()) == [("m", "big", A), ("n", "other", B)]
    spans.leave("a")
    spans.join("b", "b", ("big", "lead"), B)
    assert sorted(spans.news()) == [("m", "big", B), ("n", "other", None)]


def test_engines_do_not_mix():
    spans = Spans()
    spans.join("a", "a", ("one", "lead"), A)
    spans.join("b", "b", ("two", "lead"), B)
    spans.join("m", "m", ("two", "member"), A)
    assert list(spans.news()) == [("m", "two", B)]
    spans.join("m", "m", ("one", "member"), A)
    assert list(spans.news()) == [("m", "one", A)]
    spans.join("m", "m", None, A)
    assert list(spans.news()) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([None, "leave", "lead", "member"]), st.sampled_from("xy")), max_size=30
    )
)
def test_what_members_were_told_last_is_the_truth(steps):
    spans, joined, told = Spans(), {}, {}
    for ident, what, engine in steps:
        if what == "leave":
            spans.leave(ident)
            joined.pop(ident, None)
        else:
            wanted = None if what is None else (engine, what)
            taken = what == "lead" and any(j == wanted for i, j in joined.items() if i != ident)
            if taken:
                with pytest.raises(RefusedError):
                    spans.join(ident, ident, wanted, (ident.encode() * 16, ident, 1))
                continue
            spans.join(ident, ident, wanted, (ident.encode() * 16, ident, 1))
            joined[ident] = wanted
        told |= {i: (e, p) for i, e, p in spans.news()}
        for member, wanted in joined.items():
            if wanted is not None and wanted[1] == "member":
                lead = next((i for i, j in joined.items() if j == (wanted[0], "lead")), None)
                assert told[member] == (wanted[0], None if lead is None else (lead.encode() * 16, lead, 1))
