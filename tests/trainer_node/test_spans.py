"""Who leads an engine on several hosts, and which of its members have to be told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.errors import RefusedError
from p2pcast.limits import CLAIM_S, MAX_CLAIMS
from trainer_node.spans import Spans

A, B = (b"a" * 16, "host-a", 1), (b"b" * 16, "host-b", 2)
AGAIN = (b"a" * 16, "host-a", 9)


def test_members_learn_of_their_lead_whoever_comes_first():
    spans = Spans()
    spans.join("m1", "m1", ("big", "member"), B, now=0)
    assert list(spans.news()) == [("m1", "big", None)]
    spans.join("a", "a", ("big", "lead"), A, now=0)
    spans.join("m2", "m2", ("big", "member"), B, now=0)
    spans.join("x", "x", None, B, now=0)
    assert list(spans.news()) == [("m1", "big", A), ("m2", "big", A)]
    assert list(spans.news()) == []


def test_members_learn_when_it_goes_and_comes_back_elsewhere():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A, now=0)
    spans.join("m", "m", ("big", "member"), B, now=0)
    list(spans.news())
    spans.leave("a", 0)
    assert list(spans.news()) == [("m", "big", None)]
    spans.join("a", "a", ("big", "lead"), AGAIN, now=0)
    assert list(spans.news()) == [("m", "big", AGAIN)]
    spans.join("a", "a", ("big", "lead"), A, now=0)  # without a word of farewell
    assert list(spans.news()) == [("m", "big", A)]


def test_a_member_that_joins_again_is_told_again():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A, now=0)
    for _ in range(2):
        spans.join("m", "m", ("big", "member"), B, now=0)
        assert list(spans.news()) == [("m", "big", A)]


def test_a_second_lead_is_refused_and_changes_nothing():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A, now=0)
    spans.join("b", "b", ("other", "lead"), B, now=0)
    with pytest.raises(RefusedError, match=r"engine big has a lead already: 61616161 at host-a:1; join b with --role member"):
        spans.join("b", "b", ("big", "lead"), B, now=0)
    spans.join("m", "m", ("big", "member"), B, now=0)
    spans.join("n", "n", ("other", "member"), B, now=0)
    assert list(spans.news()) == [("m", "big", A), ("n", "other", B)]
    spans.leave("a", 0)
    spans.join("b", "b", ("big", "lead"), B, now=CLAIM_S)
    assert sorted(spans.news()) == [("m", "big", B), ("n", "other", None)]


def test_engines_do_not_mix():
    spans = Spans()
    spans.join("a", "a", ("one", "lead"), A, now=0)
    spans.join("b", "b", ("two", "lead"), B, now=0)
    spans.join("m", "m", ("two", "member"), A, now=0)
    assert list(spans.news()) == [("m", "two", B)]
    spans.join("m", "m", ("one", "member"), A, now=0)
    assert list(spans.news()) == [("m", "one", A)]
    spans.join("m", "m", None, A, now=0)
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
            spans.leave(ident, 0, evicted=True)
            joined.pop(ident, None)
        else:
            wanted = None if what is None else (engine, what)
            taken = what == "lead" and any(j == wanted for i, j in joined.items() if i != ident)
            if taken:
                with pytest.raises(RefusedError):
                    spans.join(ident, ident, wanted, (ident.encode() * 16, ident, 1), now=0)
                continue
            spans.join(ident, ident, wanted, (ident.encode() * 16, ident, 1), now=0)
            joined[ident] = wanted
        told |= {i: (e, p) for i, e, p in spans.news()}
        for member, wanted in joined.items():
            if wanted is not None and wanted[1] == "member":
                lead = next((i for i, j in joined.items() if j == (wanted[0], "lead")), None)
                assert told[member] == (wanted[0], None if lead is None else (lead.encode() * 16, lead, 1))


def test_the_name_of_an_engine_is_kept_for_a_lead_that_is_away():
    spans = Spans()
    spans.join("a", "a", ("big", "lead"), A, now=0)
    spans.leave("a", 10)
    with pytest.raises(
        RefusedError, match=r"engine big was led by a until 5 s ago, and its name is kept for 600 s; .*p2pcast evict a"
    ):
        spans.join("thief", "t", ("big", "lead"), B, now=15)
    spans.join("a", "a", ("big", "lead"), AGAIN, now=20)
    spans.leave("a", 30)
    spans.join("thief", "t", ("big", "lead"), B, now=30 + CLAIM_S)
    assert spans.claims == {"big": "thief"}


def test_the_name_is_free_when_its_lead_is_evicted_or_leads_no_more():
    spans = Spans()
    for how in ("evicted", "member"):
        spans.join("a", "a", (how, "lead"), A, now=0)
        if how == "evicted":
            spans.leave("a", 1, evicted=True)
        else:
            spans.join("a", "a", (how, "member"), A, now=1)
        spans.join("b", "b", (how, "lead"), B, now=1)
        assert spans.claims[how] == "b"


def test_claims_outlive_the_hub():
    before, after = Spans(), Spans()
    before.join("a", "a", ("big", "lead"), A, now=0)
    after.recall(before.claims, 100)
    with pytest.raises(RefusedError, match="is kept"):
        after.join("thief", "t", ("big", "lead"), B, now=101)
    after.join("a", "a", ("big", "lead"), A, now=102)


def test_claims_are_bounded():
    spans = Spans()
    for most in (MAX_CLAIMS - 10, MAX_CLAIMS + 10):
        spans.recall({f"old {n}": f"lead {n}" for n in range(most)}, 0)
        spans.join("b", "b", ("big", "lead"), B, now=0)
        assert len(spans.claims) == min(MAX_CLAIMS, most + 1)
        assert spans.claims["big"] == "b"


def test_a_lead_learns_who_its_members_are():
    spans, nodes = Spans(), [bytes([n]) * 16 for n in (1, 2, 3)]
    spans.join(nodes[0].hex(), "m1", ("big", "member"), B, now=0)
    spans.join("a", "a", ("big", "lead"), A, now=0)
    assert list(spans.rosters()) == [("a", "big", [nodes[0]])]
    assert list(spans.rosters()) == []
    spans.join(nodes[1].hex(), "m2", ("big", "member"), B, now=0)
    spans.join(nodes[2].hex(), "x", ("other", "member"), B, now=0)
    assert list(spans.rosters()) == [("a", "big", nodes[:2])]
    spans.leave(nodes[0].hex(), 0)
    assert list(spans.rosters()) == [("a", "big", [nodes[1]])]
    spans.join("a", "a", ("big", "lead"), A, now=0)  # without a word of farewell
    assert list(spans.rosters()) == [("a", "big", [nodes[1]])]


def test_an_engine_has_so_many_members(monkeypatch):
    monkeypatch.setattr("trainer_node.spans.MAX_MEMBERS", 2)
    spans = Spans()
    for ident in ("m1", "m2", "m2"):
        spans.join(ident, ident, ("big", "member"), B, now=0)
    with pytest.raises(RefusedError, match="has 2 members already"):
        spans.join("m3", "m3", ("big", "member"), B, now=0)
