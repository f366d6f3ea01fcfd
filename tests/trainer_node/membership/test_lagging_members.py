"""Peers that fall behind, or cannot be reached: which are moved, and which are not blamed."""

from __future__ import annotations

import pytest
from lettered_members import GBIT, ident, joined, links, peer

from p2pcast.relay.child_lag import Inflow
from topology.reachability import FORGET_S, Contact
from topology.slow_peers import SUSTAINED
from trainer_node.membership.membership import RATED_BYTES, REPAIR_S, Membership
from trainer_node.membership.peer_record import PeerRecord


def fall_behind(members: Membership, mbit: dict[str, float], windows: int, falls: str) -> list[tuple[int, str]]:
    """A version of which each peer reports its inflow after each quarter of a second, in the order of the plan.
    ``falls`` falls behind its parent by the bytes that it does not get. Returns the window and the peer of each report
    that changed the plan.
    """
    moved = []
    for peer_ident in members.plan.order:
        members.note_parent(peer_ident, members.plan.parent[peer_ident], members.plan.epoch)
    members.begin_version()
    for window in range(1, windows + 1):
        for peer_ident in members.plan.order:
            name = bytes.fromhex(peer_ident).decode()
            got = int(mbit[name] * 125_000 / 4)
            behind = window * (3_125_000 - got) if name == falls else 0
            if members.note_inflow(peer_ident, window / 4, Inflow(got, 0.25, behind)):
                moved.append((window, name))
    return moved


def test_a_peer_that_falls_behind_is_moved_at_once():
    """The peer moves to a tail, where it may feed the next newcomer. In a fork both children would get half the rate,
    and no recovery would be visible.
    """
    members = joined("abcdef")
    rates = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "e": 20.0, "f": 20.0}
    assert fall_behind(members, rates, 2, "e") == [(2, "e")]
    assert links(members) == {"a": "", "b": "a", "c": "b", "d": "c", "f": "d", "e": "f"}
    assert not members.rate(ident("e")).bps > 20e6
    members.join(peer("g"), 3.0)
    assert links(members)["g"] == "e"
    assert fall_behind(members, dict.fromkeys("abcdefg", 100.0) | {"c": 20.0, "d": 20.0}, 2, "c") == [(2, "c")]
    assert links(members) == {"a": "", "b": "a", "d": "b", "f": "d", "e": "f", "g": "e", "c": "g"}
    assert members.plan.leaves == set()
    for version in range(SUSTAINED + 1):
        members.begin_version()
        for name in "abcdefg":
            members.note_transfer(
                ident(name), 4.0 + version, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / (40e6 if name in "eg" else 100e6)
            )
        members.replan(4.5 + version)
    assert members.plan.depth_of(ident("e")) >= 6, "a peer that stays slow is last"
    assert members.plan.leaves == set()
    assert not members.detached


def test_children_that_share_a_parents_rate_are_not_blamed():
    members = joined("abcde")
    members.peers[ident("d")].sent_epoch = members.plan.epoch
    assert members.note_parent(ident("d"), ident("b"), members.plan.epoch)
    assert members.plan.children(ident("b")) == (ident("c"), ident("d"))
    members.note_report(ident("c"), 1.0)
    rates = {"a": 100.0, "b": 100.0, "c": 50.0, "d": 50.0, "e": 50.0}
    assert len(fall_behind(members, rates, 4, "d")) <= 1
    assert members.plan.leaves == set()


def test_children_are_not_blamed_while_a_moved_peer_is_still_attached():
    members = joined("abcdef")
    rates = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "e": 20.0, "f": 20.0}
    fall_behind(members, rates, 2, "e")
    members.note_parent(ident("f"), ident("d"), members.plan.epoch)  # f obeys before e has left
    members.peers[ident("e")].sent_epoch = members.plan.epoch
    for window in range(3, 9):
        assert not members.note_inflow(ident("f"), window / 4, Inflow(1_500_000, 0.25, window * 1_500_000))
    members.note_parent(ident("e"), ident("f"), members.plan.epoch)
    assert not members.note_inflow(ident("f"), 9 / 4, Inflow(3_125_000, 0.25, 9_000_000))


def test_a_parent_is_slow_when_its_next_child_is_no_faster():
    """Only the uplink may be slow: then every child below the peer falls behind."""
    members = joined("abcdef")
    rates = {"a": 100.0, "b": 100.0, "c": 20.0, "d": 20.0, "e": 20.0, "f": 20.0}
    assert fall_behind(members, rates | {"f": 100.0}, 2, "c") == [(2, "c")]
    assert links(members) == {"a": "", "b": "a", "d": "b", "e": "d", "f": "e", "c": "f"}
    members.note_parent(ident("c"), ident("f"), members.plan.epoch)
    members.note_parent(ident("d"), ident("b"), members.plan.epoch)
    assert members.note_inflow(ident("d"), 0.75, Inflow(625_000, 0.25, 6_000_000))
    assert links(members) == {"a": "", "d": "a", "e": "d", "f": "e", "c": "f", "b": "c"}


def test_a_peer_left_by_its_child_feeds_no_new_peer_before_a_report():
    members = joined("abc")
    members.peers[ident("c")].sent_epoch = members.plan.epoch
    assert members.note_parent(ident("c"), ident("a"), members.plan.epoch)
    members.join(peer("d"), 1.0)
    assert links(members) == {"a": "", "b": "a", "c": "a", "d": "c"}
    members.note_report(ident("b"), 1.0)
    assert members.plan.leaves == set()
    members.join(peer("e"), 2.0)
    assert links(members)["e"] == "b"


def test_a_peer_that_sent_garbage_feeds_no_new_peer_after_a_report():
    members = joined("abc")
    members.peers[ident("c")].sent_epoch = members.plan.epoch
    assert members.note_parent(ident("c"), ident("a"), members.plan.epoch)
    assert members.note_garbled(ident("c"), [(ident("b"), 1)], 1.0) == [ident("b")]
    members.note_report(ident("b"), 1.1)
    assert members.plan.leaves == {ident("b")}
    members.replan(1.2)
    assert ident("b") not in members.plan.parent.values()


def test_peers_without_hope_are_detached_and_not_waited_for():
    members = joined("abcd")
    for _ in range(3):
        members.begin_version()
        for name, mbit in zip("abcd", (100, 100, 100, 10), strict=True):
            members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / (mbit * 1e6))
        members.replan(2.0)
    assert members.detached == {ident("d")}
    assert members.plan.leaves == {ident("d")}
    assert members.way(3.0, 4).link_bps == pytest.approx(100e6)


def test_a_thousand_peers_join_into_chains_of_equal_length():
    members = Membership(1, 10 * GBIT)
    for number in range(1000):
        members.join(PeerRecord(f"{number:08x}", str(number), f"r{number % 5}", "host", 1, 0.0), 0.0)
    assert [len(c) for c in members.plan.chains] == [10] * 100


def test_the_next_planning_repairs_a_peers_own_move():
    members = joined("abcdef")
    members.peers[ident("d")].sent_epoch = members.plan.epoch
    assert members.note_parent(ident("d"), ident("a"), members.plan.epoch)
    assert members.replan(1.0)
    assert [len(chain) for chain in members.plan.chains] == [6]
    assert not members.replan(2.0)


def test_repairs_between_broadcasts_come_at_growing_intervals():
    members = joined("abcdef")
    assert not members.repair(0.0), "no peer has strayed"

    def stray() -> None:
        members.peers[ident("d")].sent_epoch = members.plan.epoch
        (chain,) = members.plan.chains
        assert members.note_parent(chain[3], chain[0], members.plan.epoch)
        members.note_report(chain[2], 1.0)

    stray()
    assert members.repair(1.0)
    assert [len(chain) for chain in members.plan.chains] == [6]
    assert not members.repair(100.0)
    stray()
    assert members.repair(100.0)
    stray()
    assert not members.repair(100.0 + 2 * REPAIR_S - 0.1), "it cannot reach its parent there"
    assert members.repair(100.0 + 2 * REPAIR_S)
    stray()
    members.begin_version()
    assert members.repair(100.1 + 2 * REPAIR_S), "after a version it is as at first"


def test_peers_that_could_not_be_linked_for_a_while_are_linked_again_between_broadcasts():
    members = joined("")
    for number, name in enumerate("ab"):
        one = peer(name)
        one.site, one.ways, one.families = "site", (Contact(("192.0.2.1", number), 4),), (4,)
        members.join(one, 0.0)
    members.reach.unreached(ident("b"), ident("a"), 1.0)
    members.reach.unreached(ident("a"), ident("b"), 1.0)
    assert members.reach_changed(1.0)
    assert links(members) == {"a": "", "b": ""}
    assert not members.repair(FORGET_S)
    assert members.repair(1.0 + FORGET_S)
    assert links(members) == {"a": "", "b": "a"}
