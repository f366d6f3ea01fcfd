"""The lead of an engine on several hosts, and the members that must be told of a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.limits import CLAIM_S, MAX_CLAIMS
from trainer_node.membership.multi_host_engines import MultiHostEngines

A, B = (b"a" * 16, "host-a", 1), (b"b" * 16, "host-b", 2)
AGAIN = (b"a" * 16, "host-a", 9)


def test_members_are_told_their_lead_in_any_order_of_joining():
    groups = MultiHostEngines()
    groups.join("m1", "m1", ("big", "member"), B, now=0)
    assert list(groups.changed_leads()) == [("m1", "big", None)]
    groups.join("a", "a", ("big", "lead"), A, now=0)
    groups.join("m2", "m2", ("big", "member"), B, now=0)
    groups.join("x", "x", None, B, now=0)
    assert list(groups.changed_leads()) == [("m1", "big", A), ("m2", "big", A)]
    assert list(groups.changed_leads()) == []


def test_members_learn_of_a_leads_departure_and_new_address():
    groups = MultiHostEngines()
    groups.join("a", "a", ("big", "lead"), A, now=0)
    groups.join("m", "m", ("big", "member"), B, now=0)
    list(groups.changed_leads())
    groups.leave("a", 0)
    assert list(groups.changed_leads()) == [("m", "big", None)]
    groups.join("a", "a", ("big", "lead"), AGAIN, now=0)
    assert list(groups.changed_leads()) == [("m", "big", AGAIN)]
    groups.join("a", "a", ("big", "lead"), A, now=0)  # without a word of farewell
    assert list(groups.changed_leads()) == [("m", "big", A)]


def test_a_member_that_rejoins_is_told_its_lead_again():
    groups = MultiHostEngines()
    groups.join("a", "a", ("big", "lead"), A, now=0)
    for _ in range(2):
        groups.join("m", "m", ("big", "member"), B, now=0)
        assert list(groups.changed_leads()) == [("m", "big", A)]


def test_a_second_lead_is_refused_and_changes_nothing():
    groups = MultiHostEngines()
    groups.join("a", "a", ("big", "lead"), A, now=0)
    groups.join("b", "b", ("other", "lead"), B, now=0)
    with pytest.raises(
        RefusedError, match=r"engine big has a lead already: 61616161 at host-a:1; join b with --role member"
    ):
        groups.join("b", "b", ("big", "lead"), B, now=0)
    groups.join("m", "m", ("big", "member"), B, now=0)
    groups.join("n", "n", ("other", "member"), B, now=0)
    assert list(groups.changed_leads()) == [("m", "big", A), ("n", "other", B)]
    groups.leave("a", 0)
    groups.join("b", "b", ("big", "lead"), B, now=CLAIM_S)
    assert sorted(groups.changed_leads()) == [("m", "big", B), ("n", "other", None)]


def test_engines_do_not_mix():
    groups = MultiHostEngines()
    groups.join("a", "a", ("one", "lead"), A, now=0)
    groups.join("b", "b", ("two", "lead"), B, now=0)
    groups.join("m", "m", ("two", "member"), A, now=0)
    assert list(groups.changed_leads()) == [("m", "two", B)]
    groups.join("m", "m", ("one", "member"), A, now=0)
    assert list(groups.changed_leads()) == [("m", "one", A)]
    groups.join("m", "m", None, A, now=0)
    assert list(groups.changed_leads()) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([None, "leave", "lead", "member"]), st.sampled_from("xy")),
        max_size=30,
    )
)
def test_the_lead_last_sent_to_members_is_current(steps):
    groups, joined, told = MultiHostEngines(), {}, {}
    for ident, what, engine in steps:
        if what == "leave":
            groups.leave(ident, 0, evicted=True)
            joined.pop(ident, None)
        else:
            wanted = None if what is None else (engine, what)
            taken = what == "lead" and any(j == wanted for i, j in joined.items() if i != ident)
            if taken:
                with pytest.raises(RefusedError):
                    groups.join(ident, ident, wanted, (ident.encode() * 16, ident, 1), now=0)
                continue
            groups.join(ident, ident, wanted, (ident.encode() * 16, ident, 1), now=0)
            joined[ident] = wanted
        told |= {i: (e, p) for i, e, p in groups.changed_leads()}
        for member, wanted in joined.items():
            if wanted is not None and wanted[1] == "member":
                lead = next((i for i, j in joined.items() if j == (wanted[0], "lead")), None)
                assert told[member] == (wanted[0], None if lead is None else (lead.encode() * 16, lead, 1))


def test_the_name_of_an_engine_is_kept_for_a_lead_that_is_away():
    groups = MultiHostEngines()
    groups.join("a", "a", ("big", "lead"), A, now=0)
    groups.leave("a", 10)
    with pytest.raises(
        RefusedError, match=r"engine big was led by a until 5 s ago, and its name is kept for 600 s; .*p2pcast evict a"
    ):
        groups.join("thief", "t", ("big", "lead"), B, now=15)
    groups.join("a", "a", ("big", "lead"), AGAIN, now=20)
    groups.leave("a", 30)
    groups.join("thief", "t", ("big", "lead"), B, now=30 + CLAIM_S)
    assert groups.claims == {"big": "thief"}


def test_the_name_is_free_when_its_lead_is_evicted_or_leads_no_more():
    groups = MultiHostEngines()
    for how in ("evicted", "member"):
        groups.join("a", "a", (how, "lead"), A, now=0)
        if how == "evicted":
            groups.leave("a", 1, evicted=True)
        else:
            groups.join("a", "a", (how, "member"), A, now=1)
        groups.join("b", "b", (how, "lead"), B, now=1)
        assert groups.claims[how] == "b"


def test_claims_outlive_the_hub():
    before, after = MultiHostEngines(), MultiHostEngines()
    before.join("a", "a", ("big", "lead"), A, now=0)
    after.recall(before.claims, 100)
    with pytest.raises(RefusedError, match="is kept"):
        after.join("thief", "t", ("big", "lead"), B, now=101)
    after.join("a", "a", ("big", "lead"), A, now=102)


def test_claims_are_bounded():
    groups = MultiHostEngines()
    for most in (MAX_CLAIMS - 10, MAX_CLAIMS + 10):
        groups.recall({f"old {n}": f"lead {n}" for n in range(most)}, 0)
        groups.join("b", "b", ("big", "lead"), B, now=0)
        assert len(groups.claims) == min(MAX_CLAIMS, most + 1)
        assert groups.claims["big"] == "b"


def test_a_lead_is_told_its_members():
    groups, nodes = MultiHostEngines(), [bytes([n]) * 16 for n in (1, 2, 3)]
    groups.join(nodes[0].hex(), "m1", ("big", "member"), B, now=0)
    groups.join("a", "a", ("big", "lead"), A, now=0)
    assert list(groups.changed_rosters()) == [("a", "big", [nodes[0]])]
    assert list(groups.changed_rosters()) == []
    groups.join(nodes[1].hex(), "m2", ("big", "member"), B, now=0)
    groups.join(nodes[2].hex(), "x", ("other", "member"), B, now=0)
    assert list(groups.changed_rosters()) == [("a", "big", nodes[:2])]
    groups.leave(nodes[0].hex(), 0)
    assert list(groups.changed_rosters()) == [("a", "big", [nodes[1]])]
    groups.join("a", "a", ("big", "lead"), A, now=0)  # without a word of farewell
    assert list(groups.changed_rosters()) == [("a", "big", [nodes[1]])]


def test_an_engine_has_so_many_members(monkeypatch):
    monkeypatch.setattr("trainer_node.membership.multi_host_engines.MAX_MEMBERS", 2)
    groups = MultiHostEngines()
    for ident in ("m1", "m2", "m2"):
        groups.join(ident, ident, ("big", "member"), B, now=0)
    with pytest.raises(RefusedError, match="has 2 members already"):
        groups.join("m3", "m3", ("big", "member"), B, now=0)
