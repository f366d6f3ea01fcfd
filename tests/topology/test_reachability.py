"""Reachability from address families, from the hub's own attempts, and from peers' attempts."""

from __future__ import annotations

import pytest

from topology.plan_tree import ROOT
from topology.reachability import FORGET_S, MOST_S, Contact, Reach

V4, V6 = Contact(("203.0.113.1", 7), 4), Contact(("2001:db8::1", 7), 6)


def way(n: int, **fields) -> Contact:
    return Contact((f"203.0.113.{n}", 7), 4, **fields)


@pytest.fixture
def reach() -> Reach:
    """Two that answer, in two places."""
    reach = Reach()
    for n, name in enumerate("ab", 1):
        reach.join(name, f"site-{n}", [way(n)], [4])
        reach.answered(name, way(n).address, True)
    return reach


def shut_in(reach: Reach, name: str, n: int, site: str | None = None) -> None:
    """Join a peer behind a NAT that accepts no connections."""
    reach.join(name, site or f"site-{n}", [way(n)], [4])
    reach.answered(name, way(n).address, False)


def test_where_all_answer_nothing_needs_a_look(reach) -> None:
    assert reach.plain
    assert reach.dials("a", "b", 0)
    assert reach.links(ROOT, "a", 0)


def test_an_unreachable_peer_may_feed_peers_by_dialling(reach) -> None:
    shut_in(reach, "n", 9)
    assert reach.shut("n")
    assert not reach.plain
    assert not reach.dials("a", "n", 0)
    assert reach.dials("n", "a", 0)
    assert reach.links("n", "a", 0)
    assert reach.links("a", "n", 0)


def test_two_unreachable_peers_link_only_inside_one_site(reach) -> None:
    shut_in(reach, "n", 9)
    shut_in(reach, "m", 8)
    shut_in(reach, "k", 7, "site-9")
    assert not reach.links("n", "m", 0)
    assert not reach.links("m", "n", 0)
    assert reach.links("n", "k", 0)
    assert reach.links(ROOT, "n", 0)


def test_unknown_pairs_count_as_reachable(reach) -> None:
    reach.join("n", "site-9", [way(9), V6], [4, 6])
    assert reach.dials("a", "n", 0)
    reach.answered("n", way(9).address, False)
    assert reach.dials("a", "n", 0), "one address is still to be tried"
    reach.answered("n", V6.address, False)
    assert not reach.dials("a", "n", 0)


def test_failed_dials_of_a_hub_count_only_once_a_peer_answers() -> None:
    reach = Reach()
    shut_in(reach, "n", 9)
    shut_in(reach, "m", 8)
    assert reach.plain
    reach.unreached("m", "n", 0)
    assert reach.shut("n")
    assert not reach.shut("m")
    reach.reached("m", "n")
    assert not reach.shut("n"), "a peer got in after all"
    assert reach.plain


def test_the_first_answer_gives_weight_to_failed_dials() -> None:
    reach = Reach()
    shut_in(reach, "n", 9)
    assert not reach.shut("n")
    reach.join("a", "site-1", [way(1)], [4])
    reach.answered("a", way(1).address, True)
    assert reach.shut("n")
    reach.leave("a")
    assert not reach.shut("n")


def test_repeated_failed_tries_are_remembered_for_longer(reach) -> None:
    reach.unreached("a", "b", 100.0)
    assert not reach.dials("a", "b", 100.0 + FORGET_S - 1)
    assert reach.dials("b", "a", 100.0)
    assert reach.links("b", "a", 100.0), "b can dial a"
    reach.unreached("b", "a", 100.0)
    assert not reach.links("a", "b", 101.0)
    assert reach.dials("a", "b", 100.0 + FORGET_S)
    reach.unreached("a", "b", 200.0)
    assert not reach.dials("a", "b", 200.0 + 2 * FORGET_S - 1)
    for _ in range(20):
        reach.unreached("a", "b", 1000.0)
    assert reach.dials("a", "b", 1000.0 + MOST_S)
    assert not reach.shut("b"), "it answers the hub, whatever others say"
    reach.reached("a", "b")
    assert reach.dials("a", "b", 1000.0)


def test_the_end_of_each_failures_time_is_told_once(reach) -> None:
    assert not reach.forgot(0.0)
    reach.unreached("a", "b", 100.0)
    reach.unreached("b", "a", 110.0)
    assert not reach.forgot(100.0 + FORGET_S - 1)
    assert reach.forgot(100.0 + FORGET_S)
    assert not reach.forgot(100.0 + FORGET_S)
    assert reach.forgot(110.0 + FORGET_S)
    assert not reach.forgot(1e9)


def test_findings_on_a_departed_peer_are_forgotten(reach) -> None:
    reach.unreached("a", "b", 0)
    reach.join("b", "site-2", [way(2)], [4])
    assert reach.dials("a", "b", 1)
    assert reach.plain
    reach.unreached("a", "nobody", 0)
    reach.answered("nobody", way(1).address, False)
    reach.answered("a", ("10.9.9.9", 1), False)
    assert reach.plain


def test_families(reach) -> None:
    """A peer with only IPv6 and a peer with only IPv4 never link; a peer with both feeds either."""
    reach.join("six", "site-6", [V6], [6])
    reach.join("both", "site-7", [V6, way(7)], [4, 6])
    reach.join("name", "site-8", [Contact(("peer.example", 7))], [6])
    assert not reach.plain
    assert not reach.links("a", "six", 0)
    assert reach.links("both", "six", 0)
    assert reach.links("both", "a", 0)
    assert reach.links("name", "a", 0), "a name may lead anywhere"
    assert reach.ways("a", "both") == [way(7).address]


def test_the_likeliest_address_comes_first(reach) -> None:
    outside, inside, advertised = way(5), Contact(("192.168.1.5", 7), 4, own=True), way(6)
    reach.join("n", "site-5", [outside, inside, advertised], [4])
    assert reach.ways("a", "n") == [outside.address, inside.address, advertised.address]
    reach.answered("n", outside.address, False)
    reach.answered("n", advertised.address, True)
    assert reach.ways("a", "n") == [advertised.address, inside.address, outside.address]
    reach.join("m", "site-5", [], [4])
    assert reach.ways("m", "n")[0] == inside.address, "at one site its own address is nearest"
    assert reach.ways("m", "nobody") == []
    assert reach.answers("n")[0] == (outside.address, False)


def test_loopback_is_for_the_hubs_own_machine(reach) -> None:
    loopback = Contact(("127.0.0.1", 7), 4, loopback=True)
    reach.join("n", "127.0.0.1", [loopback], [4], beside_hub=True)
    reach.join("m", "127.0.0.1", [loopback], [4], beside_hub=True)
    assert reach.dials("m", "n", 0)
    assert not reach.dials("a", "n", 0)
    assert reach.dials("n", "a", 0)


def test_a_repeated_failure_is_not_recorded():
    """Each recorded change would be sent to every peer."""
    reach = Reach()
    for name in "ab":
        reach.join(name, name, [Contact((name, 1), 4)])
    reach.unreached("a", "b", 0.0)
    turn = reach.turn
    for n in range(100):
        reach.unreached("a", "b", FORGET_S * n / 200)
    assert reach.turn == turn
    reach.unreached("a", "b", FORGET_S + 1)
    assert reach.turn == turn + 1
