"""Tokens, holders, names and evictions at the hub."""

from __future__ import annotations

import json

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.node_names import default_name, is_name
from p2pcast.trust.token_register import KNOWN_S, LEGACY_TTL_S, NAME_KEPT_S, Holder, TokenRegister

NOW = 1_000_000.0
SECRET = bytes(range(20))
IDENT = JoinToken(b"", SECRET).ident
A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def ledger() -> TokenRegister:
    made = TokenRegister()
    made.grant(SECRET, "peer", NOW)
    return made


def admit(
    ledger: TokenRegister,
    node: bytes = A,
    *,
    role="peer",
    key="k",
    now=NOW,
    until=NOW + 100,
    local=False,
    ident=IDENT,
    name="one",
):
    ledger.admit(ident, node, role, key, name, now, until, local=local)


def again(ledger: TokenRegister) -> TokenRegister:
    """As after a restart."""
    return TokenRegister.of(json.loads(json.dumps(ledger.document)))


def test_a_token_admits_any_number_and_is_counted(ledger):
    for number in range(5):
        admit(ledger, bytes([number]) * 16)
    (row,) = again(ledger).rows(NOW)
    assert (row["used"], row["uses"], row["usable"], row["role"]) == (5, None, True, "peer")


def test_an_unknown_token_admits_no_node(ledger):
    with pytest.raises(RefusedError, match="not one that this hub gave out"):
        admit(ledger, ident=b"?" * 8)
    assert ledger.holders == {}


def test_a_token_expires(ledger):
    secret = b"s" * 20
    ledger.grant(secret, "peer", NOW, ttl_s=60)
    ident = JoinToken(b"", secret).ident
    admit(ledger, ident=ident, now=NOW + 59)
    for book in (ledger, again(ledger)):
        with pytest.raises(RefusedError, match="has expired"):
            admit(book, B, ident=ident, now=NOW + 60)


def test_a_token_is_used_up(ledger):
    secret = b"s" * 20
    ledger.grant(secret, "peer", NOW, uses=2)
    ident = JoinToken(b"", secret).ident
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


def test_a_peers_token_gives_no_trainers_certificate(ledger):
    with pytest.raises(RefusedError, match="admits as peer, not as trainer"):
        admit(ledger, role="trainer")
    with pytest.raises(RefusedError, match="admits as peer"):
        admit(ledger, role="trainer", local=True)
    own = b"o" * 20
    ledger.grant(own, "peer", NOW, own=True)
    with pytest.raises(RefusedError, match="admits as peer"):
        admit(ledger, role="trainer", ident=JoinToken(b"", own).ident)
    admit(ledger, role="trainer", ident=JoinToken(b"", own).ident, local=True)


@pytest.mark.parametrize("role", ["hub", "", "root"])
def test_no_token_is_made_for_other_roles(ledger, role):
    with pytest.raises(UsageError, match="cannot give the role"):
        ledger.grant(b"x" * 20, role, NOW)


def test_a_nodes_id_belongs_to_its_first_key(ledger):
    admit(ledger, key="mine")
    for book in (ledger, again(ledger)):
        for now in (NOW, NOW + 101):  # in force, and run out
            with pytest.raises(RefusedError, match="belongs to another key"):
                admit(book, key="theirs", now=now, until=now + 100)
        with pytest.raises(RefusedError, match="belongs to another key"):
            book.renew(A, "peer", "theirs", NOW, NOW + 9)
    later = NOW + 101 + KNOWN_S
    admit(ledger, B, key="b", now=later, until=later + 9)
    admit(ledger, key="theirs", now=later, until=later + 9)


def test_a_known_node_needs_its_key_and_no_token_in_force(ledger):
    """A known node needs no token: expired, revoked, used up or another. Any other node needs one."""
    secret = b"s" * 20
    ledger.grant(secret, "peer", NOW, ttl_s=60, uses=1)
    ident = JoinToken(b"", secret).ident
    admit(ledger, ident=ident)
    for now in (NOW + 61, NOW + 101, NOW + 100 + KNOWN_S - 1):
        book = again(ledger)
        admit(book, ident=ident, now=now, until=now + 50)
        assert book.holders[A.hex()].until == now + 50
        assert book.tokens[ident.hex()].used == 1
        with pytest.raises(RefusedError, match=r"has expired|used up"):
            admit(book, B, key="b", ident=ident, now=now)
    ledger.revoke(ident.hex())
    admit(ledger, ident=ident, now=NOW + 101, until=NOW + 200)
    with pytest.raises(RefusedError, match="belongs to another key"):
        admit(ledger, ident=ident, key="theirs", now=NOW + 101)


def test_renewal_needs_a_known_certificate(ledger):
    with pytest.raises(RefusedError, match="join with a token"):
        ledger.renew(A, "peer", "k", NOW, NOW + 9)
    admit(ledger)
    ledger.renew(A, "peer", "k", NOW, NOW + 500)
    assert ledger.holders[A.hex()].until == NOW + 500
    with pytest.raises(RefusedError):
        ledger.renew(A, "trainer", "k", NOW, NOW + 500)


def test_no_token_admits_an_evicted_node(ledger):
    admit(ledger)
    for book in (ledger, again(ledger)):
        evicted = set()
        book = TokenRegister.of(book.document, evicted)
        evicted.add(A)
        for now in (NOW, NOW + 10_000):
            with pytest.raises(RefusedError, match="evicted"):
                admit(book, now=now, until=now + 100)
            with pytest.raises(RefusedError, match="evicted"):
                book.renew(A, "peer", "k", now, now + 9)
        evicted.clear()
        admit(book)


def test_records_without_effect_are_forgotten(ledger):
    """Tokens that still help a known node to renew are kept as long as the node."""
    spent, own = b"s" * 20, b"o" * 20
    ledger.grant(spent, "peer", NOW, ttl_s=10)
    ledger.grant(own, "peer", NOW, ttl_s=10, own=True)
    admit(ledger, A, until=NOW + 5, ident=JoinToken(b"", spent).ident)
    admit(ledger, B, key="b", now=NOW + 20)
    assert sorted(ledger.holders) == [A.hex(), B.hex()]
    assert len(ledger.tokens) == 3
    later = NOW + 10 + KNOWN_S
    admit(ledger, b"c" * 16, key="c", now=later, until=later + 9)
    assert sorted(ledger.holders) == [B.hex(), (b"c" * 16).hex()]
    assert list(ledger.tokens) == [IDENT.hex()]
    admit(
        ledger,
        b"t" * 16,
        key="t",
        role="trainer",
        ident=granted(ledger, b"t" * 20, "trainer"),
        now=later,
        until=later + 1,
    )
    admit(ledger, b"d" * 16, key="d", now=later + 2, until=later + 9)
    assert (b"t" * 16).hex() not in ledger.holders, "no trainer outlives its process"


def granted(ledger: TokenRegister, secret: bytes, role: str) -> bytes:
    ledger.grant(secret, role, NOW)
    return JoinToken(b"", secret).ident


def test_grants_are_bounded(ledger, monkeypatch):
    monkeypatch.setattr(limits, "MAX_HOLDERS", 2)
    monkeypatch.setattr(limits, "MAX_TOKENS", 2)
    ledger.grant(b"1" * 20, "peer", NOW)
    with pytest.raises(RefusedError, match="revoke some"):
        ledger.grant(b"2" * 20, "peer", NOW)
    ledger.grant(b"o" * 20, "peer", NOW, own=True, ttl_s=9)
    admit(ledger, A)
    admit(ledger, B, key="b", until=NOW + 200)
    with pytest.raises(RefusedError, match="hold certificates already"):
        admit(ledger, b"c" * 16, key="c")
    ledger.call(A, "one", NOW, never_connected)
    admit(ledger, b"c" * 16, key="c", now=NOW + 101, until=NOW + 200)
    assert A.hex() not in ledger.holders, "its certificate has run out"
    assert ledger.call(B, "one", NOW + 101, never_connected) == "one"


def test_ids_of_tokens_that_a_node_shows_are_bounded_and_known(ledger):
    admit(ledger)
    assert not ledger.came_with(A, IDENT)
    assert not ledger.came_with(A, b"?" * 8)
    assert not ledger.came_with(B, IDENT)
    idents = [granted(ledger, bytes([n]) * 20, "peer") for n in range(40, 60)]
    assert all(ledger.came_with(A, i) for i in idents)
    assert len(ledger.holders[A.hex()].shown) == limits.MAX_NODE_TOKENS
    assert again(ledger).holders[A.hex()].shown[-1] == idents[-1].hex()


# -- names


def never_connected(node: str) -> bool:
    return False


def always_connected(node: str) -> bool:
    return True


def test_an_exact_id_wins(ledger):
    """An id precedes equal names that an earlier release allowed."""
    admit(ledger, A)
    ledger.holders[B.hex()] = Holder("b", "peer", A.hex(), IDENT.hex(), NOW + 100, called=A.hex())
    book = again(ledger)
    assert book.find(A.hex()) == (A.hex(), "one")
    assert book.find(B.hex())[0] == B.hex()
    stranger = (b"c" * 16).hex()
    assert book.find(stranger) == (stranger, stranger), "a lost ledger knows no node"


@pytest.mark.parametrize(
    "name",
    [
        A.hex(),
        B.hex()[:8],
        "DEADBEEF",
        "0" * 31,
        "12345678",
        "",
        " a",
        "a ",
        "a\nb",
        "\x1b[2J",
        "a\u200bb",
        "\u202ea",
        "hub",
        "HUB",
        "a~12345678",
        "~",
        "x" * 129,
    ],
)
def test_ambiguous_names_are_refused(ledger, name):
    with pytest.raises(RefusedError, match=r"choose another one \(--name\)"):
        admit(ledger, name=name)
    admit(ledger)
    with pytest.raises(RefusedError, match=r"choose another one \(--name\)"):
        ledger.call(A, name, NOW, never_connected)


@pytest.mark.parametrize(
    "name", ["a", "rollout-7", "deadbee", "g" * 32, "12345678.example", "0" * 33, "Müller 3", "x" * 128, "hubs"]
)
def test_ordinary_names_are_accepted(ledger, name):
    admit(ledger, name=name)
    assert ledger.call(A, name, NOW, never_connected) == name


@pytest.mark.parametrize("host", ["3f2a9c0d1e2b", "", "hub", "h" * 200, "a~b", "node-1", "\x00"])
def test_every_host_has_a_valid_default_name(host):
    assert is_name(default_name(host))
    assert default_name("node-1") == "node-1"
    assert default_name("3f2a9c0d1e2b") == "host-3f2a9c0d1e2b"


def test_a_name_belongs_to_its_first_node(ledger):
    admit(ledger, A)
    admit(ledger, B, key="b")
    assert ledger.call(A, "one", NOW, never_connected) == "one"
    for book in (ledger, again(ledger)):
        assert book.call(B, "one", NOW + NAME_KEPT_S - 1, never_connected) == f"one~{B.hex()[:8]}"
        assert book.call(A, "one", NOW + 1, never_connected) == "one", "the present holder keeps its name"
        assert book.find("one") == (A.hex(), "one")
        assert book.find(f"one~{B.hex()[:8]}")[0] == B.hex()
        assert book.others(A.hex(), "one") == [B.hex()]
        assert book.others(A.hex(), "two") == []


def test_a_disambiguated_name_is_unique(ledger):
    """A node chooses its id, so it may begin as another's does."""
    twin = B[:4] + b"x" * 12
    for node, key in ((A, "a"), (B, "b"), (twin, "c")):
        admit(ledger, node, key=key)
    called = [ledger.call(node, "n" * 128, NOW, never_connected) for node in (A, B, twin)]
    assert len({*called}) == 3
    assert max(map(len, called)) == 128


def test_a_name_is_free_after_eviction_absence_or_rename(ledger):
    evicted = set()
    admit(ledger, A)
    admit(ledger, B, key="b")
    ledger.call(A, "one", NOW, never_connected)
    gone = TokenRegister.of(again(ledger).document, evicted)
    assert gone.call(B, "one", NOW + NAME_KEPT_S, always_connected) != "one", "it is connected"
    assert gone.call(B, "one", NOW + NAME_KEPT_S, never_connected) == "one"
    assert gone.holders[A.hex()].called == ""
    assert gone.call(A, "one", NOW + NAME_KEPT_S, never_connected) == f"one~{A.hex()[:8]}"
    out = TokenRegister.of(again(ledger).document, evicted)
    evicted.add(A)
    assert out.call(B, "one", NOW, always_connected) == "one"
    other = again(ledger)
    other.call(A, "two", NOW, always_connected)
    assert other.call(B, "one", NOW, always_connected) == "one"


def test_an_unknown_or_ambiguous_name_evicts_no_node(ledger):
    admit(ledger, A)
    with pytest.raises(RefusedError, match="no node"):
        ledger.find("two")
    for node in (b"t" * 16, b"u" * 16):
        ident = granted(ledger, node + b"1234", "trainer")
        admit(ledger, node, key=node.hex(), role="trainer", name="host rank 0", ident=ident)
    with pytest.raises(RefusedError, match="2 nodes have the name 'host rank 0'"):
        ledger.find("host rank 0")


def test_a_node_of_a_run_in_plain_text_is_known_by_its_id_and_then_by_its_key(ledger):
    """For as long as it is connected, and once links are encrypted."""
    assert ledger.adopt(A, "", "one", NOW, NOW)
    assert not ledger.adopt(A, "", "one", NOW, NOW)
    assert ledger.call(A, "one", NOW, never_connected) == "one"
    later = NOW + KNOWN_S
    ledger.saw(A.hex(), later - 1)
    admit(ledger, B, key="b", now=later, until=later + 9)
    assert ledger.find("one")[0] == A.hex()
    assert ledger.adopt(A, "a", "one", later, later + 9)
    with pytest.raises(RefusedError, match="another key"):
        ledger.renew(A, "peer", "x", later, later + 9)
    assert ledger.call(A, "one", later, always_connected) == "one"
    ledger.adopt(b"c" * 16, "", "two", later, later)
    assert ledger.call(b"c" * 16, "two", later, always_connected) == "two"
    admit(ledger, b"c" * 16, key="c", now=later, until=later + 9)
    assert ledger.call(b"c" * 16, "two", later, always_connected) == "two"


def test_the_same_command_evicts_one_node_alone(ledger):
    """The second command finds no node of that name: the node that also asked for the name has another."""
    evicted = set()
    book = TokenRegister.of(ledger.document, evicted)
    for node, key in ((A, "a"), (B, "b")):
        admit(book, node, key=key)
        book.call(node, "one", NOW, never_connected)
    evicted.add(bytes.fromhex(book.find("one")[0]))
    with pytest.raises(RefusedError, match="no node"):
        book.find("one")


# -- what an eviction takes along


def test_tokens_that_an_evicted_node_could_use_again(ledger):
    """The valid tokens that the node has used; with one of the hub's own, all of the hub's own."""
    admit(ledger, A)
    assert ledger.tokens_to_revoke(A.hex(), NOW) == [IDENT.hex()]
    assert ledger.tokens_to_revoke(B.hex(), NOW) == []
    once = b"1" * 20
    ledger.grant(once, "peer", NOW, uses=1)
    admit(ledger, B, key="b", ident=JoinToken(b"", once).ident)
    assert ledger.tokens_to_revoke(B.hex(), NOW) == [], "it is used up"
    own = [b"o" * 20, b"p" * 20]
    for secret in own:
        ledger.grant(secret, "peer", NOW, own=True, ttl_s=60)
    ledger.came_with(B, JoinToken(b"", own[0]).ident)
    assert ledger.tokens_to_revoke(B.hex(), NOW) == [JoinToken(b"", s).ident.hex() for s in own]
    assert ledger.tokens_to_revoke(B.hex(), NOW + 60) == []


# -- a ledger of release 0.1.0

OLD = {
    "tokens": {
        IDENT.hex(): {
            "secret": SECRET.hex(),
            "role": "peer",
            "created": NOW,
            "expires": None,
            "uses": None,
            "used": 4,
            "revoked": False,
            "own": True,
        }
    },
    "holders": {
        node.hex(): {"key": node.hex(), "role": role, "name": name, "token": IDENT.hex(), "until": NOW + 100}
        for node, name, role in (
            (A, "one", "peer"),
            (B, "same", "peer"),
            (b"c" * 16, "same", "peer"),
            (b"d" * 16, "12345678", "peer"),
            (b"t" * 16, "t", "trainer"),
        )
    },
    "evicted": {(b"e" * 16).hex(): "gone"},
}


def test_an_old_ledger_opens_without_loss():
    book = TokenRegister.of(OLD)
    assert book.legacy == {(b"e" * 16).hex(): "gone"}
    assert len(book.holders) == 5
    assert book.find("one") == (A.hex(), "one")
    assert book.holders[A.hex()].called == "one"
    assert {h.called for n, h in book.holders.items() if n != A.hex()} == {""}, (
        "no name of several nodes, and none that is refused now"
    )
    assert book.call(B, "one", NOW, never_connected) != "one"
    assert book.bound_own(NOW)
    assert not book.bound_own(NOW)
    assert book.own(NOW) == IDENT.hex()
    assert book.own(NOW + LEGACY_TTL_S) is None
    assert again(book).legacy == {}
    with pytest.raises(LocalError, match="later release"):
        TokenRegister.of(book.document | {"format": 3})


def test_no_row_and_no_repr_holds_a_secret(ledger):
    admit(ledger)
    shown = json.dumps(ledger.rows(NOW)) + repr(ledger) + repr(ledger.tokens)
    assert SECRET.hex() not in shown


@pytest.mark.parametrize(
    "document", [{}, {"tokens": {"a": {}}, "holders": {}, "evicted": {}}, {"tokens": [], "holders": {}, "evicted": {}}]
)
def test_the_error_names_a_damaged_ledger(document):
    with pytest.raises(LocalError, match="damaged"):
        TokenRegister.of(document)
