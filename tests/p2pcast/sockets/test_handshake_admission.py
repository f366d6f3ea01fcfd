"""Admission to TLS handshakes, and limits on pending connections, with a simulated clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.sockets import handshake_admission
from p2pcast.sockets.handshake_admission import (
    BURST,
    RATE_S,
    UNPROVEN_BURST,
    UNPROVEN_RATE_S,
    HandshakeAdmission,
    PendingConnections,
    address_block,
)

NOW = 1000.0


def through(admission: HandshakeAdmission[str], now: float) -> list[str]:
    """All connections that are admitted at ``now``."""
    found = []
    while isinstance(one := admission.next(now), str):
        found.append(one)
    return found


def flood(admission: HandshakeAdmission[str], host: str, count: int) -> None:
    for n in range(count):
        admission.enqueue(f"{host} {n}", host)


def test_without_waiting_connections_none_is_admitted():
    assert HandshakeAdmission().next(NOW) is None


def test_unauthenticated_handshakes_of_an_address_are_a_token_bucket():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    flood(admission, "a", BURST + 50)
    assert len(through(admission, NOW)) == BURST
    wait_s = admission.next(NOW)
    assert wait_s == pytest.approx(1 / RATE_S)
    assert len(through(admission, NOW + 2 + wait_s / 2)) == 2 * RATE_S


def test_an_authenticated_handshake_gives_its_token_back():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    for _ in range(20):
        flood(admission, "a", BURST)
        assert len(through(admission, NOW)) == BURST
        for _ in range(BURST):
            admission.authenticated("a", NOW)


def test_unproven_addresses_share_one_bucket():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    for n in range(1000):
        flood(admission, f"10.0.{n // 250}.{n % 250}", 2)
    assert len(through(admission, NOW)) == UNPROVEN_BURST
    assert len(through(admission, NOW + 1.001)) == UNPROVEN_RATE_S


def test_a_proven_address_does_not_wait_for_unproven_addresses():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    flood(admission, "honest", 1)
    assert through(admission, NOW) == ["honest 0"]
    admission.authenticated("honest", NOW)
    for n in range(UNPROVEN_BURST + 100):
        flood(admission, f"10.0.{n // 250}.{n % 250}", 1)
    through(admission, NOW)
    flood(admission, "honest", 5)
    assert sorted(through(admission, NOW)) == [f"honest {n}" for n in range(5)]


def test_addresses_take_turns():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    flood(admission, "a", 30)
    flood(admission, "b", 2)
    assert through(admission, NOW)[:5] == ["a 29", "b 1", "a 28", "b 0", "a 27"]


def test_a_cancelled_connection_is_not_admitted():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    flood(admission, "a", 3)
    admission.cancel("a 1", "a")
    admission.cancel("a 1", "a")
    admission.cancel("x", "nowhere")
    assert through(admission, NOW) == ["a 2", "a 0"]


def test_a_dead_connection_costs_no_token():
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    flood(admission, "a", 3 * BURST)
    flood(admission, "b", 1)
    assert admission.next(NOW, lambda one: one == "a 0") == "a 0"
    assert admission.next(NOW, lambda one: False) is None
    flood(admission, "a", BURST)
    assert len(through(admission, NOW)) == BURST - 1


def test_the_number_of_remembered_addresses_is_bounded(monkeypatch):
    monkeypatch.setattr(handshake_admission, "MAX_ADDRESSES", 10)
    admission: HandshakeAdmission[str] = HandshakeAdmission()
    for n in range(100):
        admission.authenticated(f"10.0.0.{n}", NOW)
    assert len(admission._records) == 10


def test_ipv6_addresses_count_by_their_64_bit_network():
    assert address_block("2001:db8::1") == address_block("2001:db8::ffff:1") != address_block("2001:db8:0:1::1")
    assert address_block("fe80::1%eth0") == address_block("fe80::2")
    assert address_block("192.0.2.1") == "192.0.2.1"


def test_the_oldest_of_the_fullest_address_gives_way():
    pending: PendingConnections[str] = PendingConnections(5)
    assert [pending.add(f"b{n}", "b") for n in range(2)] == [None] * 2
    assert [pending.add(f"a{n}", "a") for n in range(3)] == [None] * 3
    assert pending.add("c0", "c") == "a0"
    assert pending.add("a3", "a") in ("a1", "b0")
    pending.remove("c0")
    assert pending.add("c1", "c") is None
    assert len(pending) == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans())), st.integers(1, 6))
def test_pending_connections_never_exceed_their_capacity(steps, most):
    pending: PendingConnections[tuple[str, int]] = PendingConnections(most)
    inside: set[tuple[str, int]] = set()
    for host, number, leaves in steps:
        one = (host, number)
        if leaves or one in inside:
            pending.remove(one)
            inside.discard(one)
        else:
            inside.add(one)
            inside.discard(pending.add(one, host))
        assert set(pending.all()) == inside
        assert len(pending) == len(inside) <= most
