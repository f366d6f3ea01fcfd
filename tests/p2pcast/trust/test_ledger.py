"""Tokens, holders and evictions: what each still buys."""

from __future__ import annotations

import json

import pytest

from p2pcast import limits
from p2pcast.errors import LocalError, RefusedError, UsageError
from p2pcast.trust.ledger import Ledger
from p2pcast.wire.token import Token

NOW = 1_000_000.0
SECRET = bytes(range(20))
IDENT = Token(b"", SECRET).ident
A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.grant(SECRET, "peer", NOW)
    return made


def admit(
    ledger: Ledger, node: bytes = A, *, role="peer", key="k", now=NOW, until=NOW + 100, local=False, ident=IDENT, name="one"
):
    ledger.admit(ident, node, role, key, name, now, until, local=local)


def again(ledger: Ledger) -> Ledger:
    """As after a restart."""
    return Ledger.of(json.loads(json.dumps(ledger.document)))


def test_a_token_admits_any_number_and_is_counted(ledger):
    for number in range(5):
        admit(ledger, bytes([number]) * 16)
    (row,) = again(ledger).rows(NOW)
    assert (row["used"], row["uses"], row["usable"], row["role"]) == (5, None, True, "peer")


def test_one_that_was_never_given_out_admits_nobody(ledger):
    with pytest.raises(RefusedError, match="not one that this hub gave out"):
        admit(ledger, ident=b"?" * 8)
    assert ledger.holders == {}


def test_a_token_expires(ledger):
    secret = b"s" * 20
    ledger.grant(secret, "peer", NOW, ttl_s=60)
    ident = Token(b"", secret).ident
    admit(ledger, ident=ident, now=NOW + 59)
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="has expired"):
            admit(book, B, ident=ident, now=NOW + 60)


def test_a_token_is_used_up(ledger):
    secret = b"s" * 20
    ledger.grant(secret, "peer", NOW, uses=2)
    ident = Token(b"", secret).ident
    admit(ledger, A, ident=ident)
    admit(ledger, A, ident=ident)  # the same node and key: its answer was lost
    admit(ledger, B, ident=ident, key="b")
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="used up"):
            admit(book, b"c" * 16, ident=ident)
    assert sorted(ledger.holders) == [A.hex(), B.hex()]


def test_a_token_is_revoked_by_enough_of_its_id(ledger):
    with pytest.raises(UsageError, match="not a token's id"):
        ledger.revoke("")
    with pytest.raises(UsageError, match="not a token's id"):
        ledger.revoke("zz")
    assert ledger.revoke(IDENT.hex()[:6]) == IDENT.hex()
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="revoked"):
            admit(book)


def test_a_peers_token_buys_no_trainers_certificate(ledger):
    with pytest.raises(RefusedError, match="admits as peer, not as trainer"):
        admit(ledger, role="trainer")
    with pytest.raises(RefusedError, match="admits as peer"):
        admit(ledger, role="trainer", local=True)
    own = b"o" * 20
    ledger.grant(own, "peer", NOW, own=True)
    with pytest.raises(RefusedError, match="admits as peer"):
        admit(ledger, role="trainer", ident=Token(b"", own).ident)
    admit(ledger, role="trainer", ident=Token(b"", own).ident, local=True)


@pytest.mark.parametrize("role", ["hub", "", "root"])
def test_no_token_is_made_for_other_roles(ledger, role):
    with pytest.raises(UsageError, match="not a role"):
        ledger.grant(b"x" * 20, role, NOW)


def test_a_nodes_name_belongs_to_its_first_key(ledger):
    admit(ledger, key="mine")
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="belongs to another key"):
            admit(book, key="theirs")
        with pytest.raises(RefusedError, match="belongs to another key"):
            book.renew(A, "peer", "theirs", NOW, NOW + 9)
    admit(ledger, key="theirs", now=NOW + 101, until=NOW + 200)


def test_renewal_is_for_those_who_hold_one(ledger):
    with pytest.raises(RefusedError, match="join with a token"):
        ledger.renew(A, "peer", "k", NOW, NOW + 9)
    admit(ledger)
    ledger.renew(A, "peer", "k", NOW, NOW + 500)
    assert ledger.holders[A.hex()].until == NOW + 500
    with pytest.raises(RefusedError):
        ledger.renew(A, "trainer", "k", NOW, NOW + 500)


def test_the_evicted_get_nothing_by_whichever_token(ledger):
    admit(ledger)
    node = ledger.find("one")
    assert ledger.evict(node, "one") == IDENT.hex()
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="evicted"):
            admit(book)
        with pytest.raises(RefusedError, match="evicted"):
            book.renew(A, "peer", "k", NOW, NOW + 9)
        with pytest.raises(RefusedError, match="evicted"):
            admit(book, now=NOW + 10_000, until=NOW + 20_000)
    assert ledger.readmit("one") == A.hex()
    admit(ledger)


def test_names_that_fit_several_or_nobody(ledger):
    admit(ledger, A)
    admit(ledger, B, key="b")
    with pytest.raises(RefusedError, match="2 nodes go by 'one'"):
        ledger.find("one")
    assert ledger.find(B.hex()) == B.hex()
    with pytest.raises(RefusedError, match="no node"):
        ledger.find("two")
    with pytest.raises(RefusedError, match="not evicted"):
        ledger.readmit("one")


def test_what_has_no_effect_any_more_is_forgotten(ledger):
    spent = b"s" * 20
    ledger.grant(spent, "peer", NOW, ttl_s=10)
    admit(ledger, A, until=NOW + 5)
    admit(ledger, B, key="b", now=NOW + 20)
    assert list(ledger.holders) == [B.hex()]
    assert list(ledger.grants) == [IDENT.hex()]


def test_it_does_not_grow_for_ever(ledger, monkeypatch):
    monkeypatch.setattr(limits, "MAX_HOLDERS", 2)
    monkeypatch.setattr(limits, "MAX_TOKENS", 2)
    monkeypatch.setattr(limits, "MAX_EVICTED", 1)
    ledger.grant(b"1" * 20, "peer", NOW)
    with pytest.raises(RefusedError, match="revoke some"):
        ledger.grant(b"2" * 20, "peer", NOW)
    admit(ledger, A)
    admit(ledger, B, key="b")
    with pytest.raises(RefusedError, match="hold certificates already"):
        admit(ledger, b"c" * 16)
    ledger.evict(A.hex(), "one")
    with pytest.raises(RefusedError, match="evicted already"):
        ledger.evict(B.hex(), "two")


def test_no_row_and_no_picture_holds_a_secret(ledger):
    admit(ledger)
    shown = json.dumps(ledger.rows(NOW)) + repr(ledger) + repr(ledger.grants)
    assert SECRET.hex() not in shown


@pytest.mark.parametrize(
    "document", [{}, {"tokens": {"a": {}}, "holders": {}, "evicted": {}}, {"tokens": [], "holders": {}, "evicted": {}}]
)
def test_a_damaged_ledger_is_said_to_be(document):
    with pytest.raises(LocalError, match="damaged"):
        Ledger.of(document)
