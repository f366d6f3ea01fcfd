"""Statements about evictions: signatures, precedence and storage."""

from __future__ import annotations

import itertools
import os

import pytest

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, RefusedError
from p2pcast.trust.eviction_log import FILE, SLACK, EvictionLog
from p2pcast.trust.evictions import NO_TOKEN, Evictions, Statement, unsigned

KEY = RunKey(bytes(32))
A, B, TOKEN = b"a" * 16, b"b" * 16, b"t" * 8
NOW = 1_700_000_000.0


def decide(book: Evictions, node: bytes = A, *, evicted=True, name="one", token=TOKEN, now=NOW) -> Statement:
    return book.decide(node, token, evicted=evicted, name=name, now=now, sign=KEY.sign)


def test_an_evictions_bytes_match_the_specification():
    made = decide(Evictions())
    assert made.packed[:33] == A + TOKEN + int(NOW * 1000).to_bytes(8, "little") + b"\x01"
    assert len(made.packed) == limits.STATEMENT_BYTES
    assert made.packed[33:] == KEY.sign(b"p2pcast eviction 1\0" + made.packed[:33])
    assert Statement.parse(made.packed) == made


def test_only_statements_signed_by_the_runs_key_count():
    """Statements by another key, or with any byte changed, are refused, with all later statements of the message."""
    hub, peer = Evictions(), Evictions()
    made = decide(hub).packed
    foreign = Statement(B, TOKEN, 1, evicted=True).signed(RunKey(bytes([1]) * 32).sign).packed
    with pytest.raises(IntegrityError):
        peer.accept([foreign, made], KEY.public)
    assert not peer.nodes
    for at in range(len(made)):
        spoilt = bytearray(made)
        spoilt[at] ^= 1
        with pytest.raises(IntegrityError):
            peer.accept([bytes(spoilt)], KEY.public)
    assert not peer.nodes
    assert [s.node for s in peer.accept([made], KEY.public)] == [A]
    assert peer.nodes == {A}


def test_known_statements_are_not_verified_again(monkeypatch):
    hub, peer = Evictions(), Evictions()
    made = decide(hub).packed
    peer.accept([made], KEY.public)
    monkeypatch.setattr(Statement, "genuine", None)
    assert peer.accept([made] * 9, KEY.public) == []


def test_the_latest_statement_counts_in_any_order_of_arrival():
    hub = Evictions()
    said = [decide(hub, evicted=e).packed for e in (True, False, True)]
    for order in itertools.permutations(said):
        peer = Evictions()
        for one in order:
            peer.accept([one], KEY.public)
        assert peer.nodes == {A}
        assert peer.packed() == said[2:]


def test_an_empty_short_or_old_list_undoes_no_eviction():
    hub, peer = Evictions(), Evictions()
    first = [decide(hub).packed]
    undone = decide(hub, evicted=False).packed
    again = decide(hub).packed
    peer.accept([again], KEY.public)
    for less in ([], first, [undone]):
        peer.accept(less, KEY.public)
        assert peer.nodes == {A}
    assert not peer.take(unsigned(A)), "the word of a hub that signs none is the oldest"


def test_an_undone_eviction_is_undone_everywhere():
    hub, peer, old = Evictions(), Evictions(), Evictions()
    peer.accept([decide(hub).packed], KEY.public)
    old.take(unsigned(A))
    undone = decide(hub, evicted=False).packed
    for book in (peer, old):
        nodes = book.nodes
        book.accept([undone], KEY.public)
        assert nodes == set() == hub.nodes


def test_serials_grow_even_with_an_old_clock_or_file():
    hub = Evictions()
    first = decide(hub)
    second = decide(hub, evicted=False, now=NOW - 10**6)
    assert second.serial > first.serial
    restored = Evictions()
    assert decide(restored, now=NOW + 60).serial > second.serial


def test_a_peer_returns_missing_statements_once_per_connection():
    hub, peer = Evictions(), Evictions()
    made = [decide(hub, bytes([n]) * 16).packed for n in range(limits.MAX_RELAYED + 3)]
    peer.accept(made, KEY.public)
    peer.take(unsigned(b"z" * 16))
    assert peer.untold(KEY.public) == [], "the hub has said nothing yet"
    lost = Evictions()
    for _ in range(2):
        peer.connected()
        peer.note_stated(lost.packed())
        back = []
        while some := peer.untold(KEY.public):
            assert len(some) <= limits.MAX_RELAYED
            back += some
        assert sorted(back) == sorted(made)
    lost.accept(back, KEY.public)
    assert lost.nodes == hub.nodes
    peer.connected()
    peer.note_stated(lost.packed())
    assert peer.untold(KEY.public) == []


def test_statements_of_another_run_are_not_sent():
    hub, peer, other = Evictions(), Evictions(), RunKey(bytes([1]) * 32)
    peer.accept([decide(hub).packed], KEY.public)
    peer.connected()
    peer.note_stated([])
    assert peer.untold(other.public) == []


def test_an_eviction_revokes_its_token():
    hub, restored = Evictions(), Evictions()
    made = decide(hub).packed
    restored.accept([made], KEY.public)
    assert [*restored.tokens] == [TOKEN.hex()]
    decide(hub, evicted=False, token=NO_TOKEN)
    assert decide(hub, token=NO_TOKEN).token == TOKEN, "also when it is evicted again"
    none = Evictions()
    decide(none, token=NO_TOKEN)
    assert not none.tokens


def test_evictions_are_found_by_id_before_name():
    hub = Evictions()
    decide(hub, A, name=B.hex())
    decide(hub, B, name="two")
    assert hub.find(B.hex()) == (B, "two")
    assert hub.find("two") == (B, "two")
    with pytest.raises(RefusedError, match="not evicted"):
        hub.find("three")
    decide(hub, b"c" * 16, name="two")
    with pytest.raises(RefusedError, match="give an id"):
        hub.find("two")


def test_evictions_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_EVICTED", 2)
    monkeypatch.setattr(limits, "MAX_REVOKED", 2)
    hub = Evictions()
    decide(hub, A)
    decide(hub, B)
    decide(hub, A, evicted=False)
    decide(hub, b"c" * 16)
    assert hub.nodes == {B, b"c" * 16}, "room was made by what was undone"
    with pytest.raises(RefusedError, match="evicted already"):
        decide(hub, A)
    assert Evictions().accept(hub.packed(), KEY.public)
    for ident in ("1", "2", "3"):
        hub.revoke(ident)
    assert [*hub.tokens] == ["2", "3"]


@pytest.mark.parametrize("data", [b"", b"x" * 96, b"x" * 98, b"x" * 32, A + TOKEN + bytes(8) + b"\x02" + bytes(64)])
def test_malformed_statements_are_refused(data):
    with pytest.raises(IntegrityError):
        Statement.parse(data)


# -- on disk


def test_evictions_survive_a_restart(tmp_path):
    log = EvictionLog(tmp_path)
    decide(log.evictions, A)
    decide(log.evictions, B, evicted=False)
    log.evictions.take(unsigned(b"c" * 16))
    log.evictions.revoke("ab")
    log.save()
    log.save()
    log.close()
    for _ in range(2):
        again = EvictionLog(tmp_path)
        assert again.evictions.nodes == {A, b"c" * 16}
        assert again.evictions.packed() == log.evictions.packed()
        assert {*again.evictions.tokens} == {TOKEN.hex(), "ab"}
        assert again.evictions.find("one")[0] == A
        assert again.evictions.pending == []
        again.close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_the_eviction_log_is_compacted(tmp_path):
    log = EvictionLog(tmp_path)
    for n in range(SLACK + 8):
        log.evictions.take(Statement(A, NO_TOKEN, n + 1, evicted=bool(n % 2), signature=os.urandom(64)))
    log.save()
    log.close()
    assert (tmp_path / FILE).stat().st_size < 1000
    again = EvictionLog(tmp_path)
    assert again.evictions.nodes == {A}
    again.close()


def test_a_failed_write_is_repeated_by_the_next_save(tmp_path):
    folder = tmp_path / "state"
    log = EvictionLog(folder)
    decide(log.evictions)
    with pytest.raises(LocalError):
        log.save()
    assert log.evictions.nodes == {A}, "it is in force"
    folder.mkdir()
    log.save()
    log.close()
    again = EvictionLog(folder)
    assert again.evictions.nodes == {A}
    again.close()


def test_a_damaged_file_is_refused_by_name(tmp_path):
    log = EvictionLog(tmp_path)
    decide(log.evictions)
    log.save()
    log.evictions.revoke("ab")
    log.save()
    log.close()
    path = tmp_path / FILE
    path.write_bytes(b"0" + path.read_bytes()[1:])
    with pytest.raises(LocalError, match=FILE):
        EvictionLog(tmp_path)
    with pytest.raises(LocalError, match="damaged"):
        Evictions([{"statement": "00"}])
