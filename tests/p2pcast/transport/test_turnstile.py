"""Whose turn it is to begin a handshake, and who gives way: pure, by a clock that the tests turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.transport import turnstile
from p2pcast.transport.turnstile import BURST, RATE_S, STRANGERS_BURST, STRANGERS_RATE_S, Crowd, Turnstile, place

NOW = 1000.0


def through(gate: Turnstile[str], now: float) -> list[str]:
    """All whose turn it is now."""
    found = []
    while isinstance(one := gate.next(now), str):
        found.append(one)
    return found


def flood(gate: Turnstile[str], host: str, count: int) -> None:
    for n in range(count):
        gate.arrive(f"{host} {n}", host)


def test_nobody_waits_and_nobody_is_let_in():
    assert Turnstile().next(NOW) is None


def test_an_address_has_so_many_handshakes_for_nothing_and_earns_more():
    gate: Turnstile[str] = Turnstile()
    flood(gate, "a", BURST + 50)
    assert len(through(gate, NOW)) == BURST
    wait_s = gate.next(NOW)
    assert wait_s == pytest.approx(1 / RATE_S)
    assert len(through(gate, NOW + 2 + wait_s / 2)) == 2 * RATE_S


def test_whoever_shows_who_it_is_has_cost_nothing():
    gate: Turnstile[str] = Turnstile()
    for _ in range(20):
        flood(gate, "a", BURST)
        assert len(through(gate, NOW)) == BURST
        for _ in range(BURST):
            gate.proved("a", NOW)


def test_many_addresses_that_bring_nobody_are_worth_no_more_than_a_few():
    gate: Turnstile[str] = Turnstile()
    for n in range(1000):
        flood(gate, f"10.0.{n // 250}.{n % 250}", 2)
    assert len(through(gate, NOW)) == STRANGERS_BURST
    assert len(through(gate, NOW + 1.001)) == STRANGERS_RATE_S


def test_one_that_has_brought_somebody_does_not_wait_for_strangers():
    gate: Turnstile[str] = Turnstile()
    flood(gate, "honest", 1)
    assert through(gate, NOW) == ["honest 0"]
    gate.proved("honest", NOW)
    for n in range(STRANGERS_BURST + 100):
        flood(gate, f"10.0.{n // 250}.{n % 250}", 1)
    through(gate, NOW)
    flood(gate, "honest", 5)
    assert sorted(through(gate, NOW)) == [f"honest {n}" for n in range(5)]


def test_addresses_have_their_turns():
    gate: Turnstile[str] = Turnstile()
    flood(gate, "a", 30)
    flood(gate, "b", 2)
    assert through(gate, NOW)[:5] == ["a 29", "b 1", "a 28", "b 0", "a 27"]


def test_who_gives_up_waits_no_more():
    gate: Turnstile[str] = Turnstile()
    flood(gate, "a", 3)
    gate.give_up("a 1", "a")
    gate.give_up("a 1", "a")
    gate.give_up("x", "nowhere")
    assert through(gate, NOW) == ["a 2", "a 0"]


def test_who_has_gone_costs_nothing():
    gate: Turnstile[str] = Turnstile()
    flood(gate, "a", 3 * BURST)
    flood(gate, "b", 1)
    assert gate.next(NOW, lambda one: one == "a 0") == "a 0"
    assert gate.next(NOW, lambda one: False) is None
    flood(gate, "a", BURST)
    assert len(through(gate, NOW)) == BURST - 1


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(turnstile, "MAX_ADDRESSES", 10)
    gate: Turnstile[str] = Turnstile()
    for n in range(100):
        gate.proved(f"10.0.0.{n}", NOW)
    assert len(gate._known) == 10


def test_of_ipv6_a_network_counts():
    assert place("2001:db8::1") == place("2001:db8::ffff:1") != place("2001:db8:0:1::1")
    assert place("fe80::1%eth0") == place("fe80::2")
    assert place("192.0.2.1") == "192.0.2.1"


def test_the_oldest_of_the_fullest_address_gives_way():
    crowd: Crowd[str] = Crowd(5)
    assert [crowd.enter(f"b{n}", "b") for n in range(2)] == [None] * 2
    assert [crowd.enter(f"a{n}", "a") for n in range(3)] == [None] * 3
    assert crowd.enter("c0", "c") == "a0"
    assert crowd.enter("a3", "a") in ("a1", "b0")
    crowd.leave("c0")
    assert crowd.enter("c1", "c") is None
    assert len(crowd) == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans())), st.integers(1, 6))
def test_a_crowd_is_never_larger_than_it_may_be(steps, most):
    crowd: Crowd[tuple[str, int]] = Crowd(most)
    inside: set[tuple[str, int]] = set()
    for host, number, leaves in steps:
        one = (host, number)
        if leaves or one in inside:
            crowd.leave(one)
            inside.discard(one)
        else:
            inside.add(one)
            inside.discard(crowd.enter(one, host))
        assert set(crowd.all()) == inside
        assert len(crowd) == len(inside) <= most
