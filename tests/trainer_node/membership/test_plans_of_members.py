"""Plans of many members: chains, regions, scores, and the news for each peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lettered_members import GBIT, ident, joined, links, peer

from topology.plan_tree import ROOT, Plan
from topology.score_demotion import Standing
from trainer_node.membership.membership import RATED_BYTES, Membership
from trainer_node.membership.peer_record import PeerRecord


def test_a_stated_number_of_chains_is_kept_to_where_more_would_be_no_slower():
    members = joined("abcdef", chains=2)
    members.peers[ident("e")].sent_epoch = members.plan.epoch
    members.begin_version()
    for name, mbit in zip("abcdef", (16, 16, 16, 16, 16, 4), strict=True):
        members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / (mbit * 1e6))
    assert members.note_parent(ident("e"), ROOT, members.plan.epoch)
    assert len(members.plan.children(ROOT)) == 3
    members.note_report(ident("c"), 1.0)
    members.replan(2.0)
    assert len(members.plan.children(ROOT)) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "move", "blame", "hear", "replan"]),
            st.sampled_from("abcdefgh"),
            st.sampled_from("abcdefgh"),
        )
    )
)
def test_the_news_is_all_that_is_new(actions):
    """A peer that is told only of its own changes ends at its place in the plan."""
    members = joined("abcdefgh", chains=3)
    told: dict[str, str] = {}
    for what, name, other in actions:
        if what == "join":
            members.join(peer(name), 0.0)
        elif what == "leave":
            members.leave(ident(name), 0.0)
            told.pop(ident(name), None)
        elif what == "move":
            members.note_parent(ident(name), ident(other), members.plan.epoch)
        elif what == "blame":
            members.note_garbled(ident(other), [(ident(name), 1)], 1.0)
        elif what == "hear":
            members.note_report(ident(name), 1.0)
        else:
            members.replan(0.0)
        moved, concerned = members.take_changes()
        assert moved.keys() <= concerned
        told |= moved
        assert told == dict(members.plan.parent)
        assert members.take_changes() == ({}, set())


def fleet_of(peers: int, *versions: int) -> tuple[Membership, list[int]]:
    """A fleet of 50 Mbit/s a peer below a hub of 150 that takes versions of so many bytes; chains after each."""
    members, chains = Membership(1, 150e6), []
    for number in range(peers):
        members.join(PeerRecord(f"{number:08x}", str(number), "", "host", 1, 0.0), 0.0)
    for now, size in enumerate(versions, 1):
        members.begin_version()
        for name in members.peers:
            members.note_transfer(name, now, size, 8 * size / 50e6)
        members.sizes.published(size)
        members.replan(now)
        chains.append(len(members.plan.chains))
    return members, chains


def test_plans_suit_the_versions_that_there_are():
    assert fleet_of(32, *[64 << 20] * 5)[1] == [1] * 5, "hops are a small part of so much"
    assert fleet_of(32, *[8 << 20] * 5)[1] == [1, 1, 3, 3, 3], "better for three plannings in a row"


def test_a_whole_state_now_and_then_and_sizes_that_wobble_change_no_plan():
    large, wobbling = 1 << 33, [(8 << 20) + (n % 5 - 2) * (1 << 20) for n in range(20)]
    assert fleet_of(32, *[8 << 20] * 5, large, *[8 << 20] * 3, large, large, *[8 << 20] * 5)[1][2:] == [3] * 14
    members, _ = fleet_of(32, *wobbling)
    epoch = members.plan.epoch
    assert epoch[1] == 33, "one plan a peer that joined, and one new deal"


def test_of_more_than_before_a_plan_that_is_as_good_stays():
    assert fleet_of(32, *[8 << 20] * 5, *[1 << 30] * 12)[1][2:] == [3] * 15


@pytest.mark.parametrize("began", ["joined", "star"])
def test_peers_behind_a_shared_trunk_are_not_fed_one_by_one(began):
    """Three clusters of two behind trunks of 8 Mbit/s, a hub of 24: the measured rate of each is its share of its
    trunk, within a third.
    """
    names, trunk_bps = ["o1", "o2", "v1", "v2", "f1", "f2"], 8e6
    members = Membership(1, 24e6)
    for name in names:
        members.join(peer(name, name[0]), 0.0)
    if began == "star":
        members.plan = Plan(members.plan.epoch, {ident(name): ROOT for name in names})
    for now in range(1, 13):
        above, sizes = links(members), [2_900_000, 43_000]
        entered = {region: sum(n[0] == region and above[n][:1] != region for n in names) for region in "ovf"}
        members.begin_version()
        for place, name in enumerate(names):
            bps = trunk_bps / entered[name[0]] * (1 - (5 * now + 3 * place) % 7 / 20)
            members.note_transfer(ident(name), now, size := sizes[now % 2], 8 * size / bps)
        members.sizes.published(size)
        members.replan(now)
        assert began == "star" or set(entered.values()) == {1}
    assert set(entered.values()) == {1}


@pytest.mark.parametrize("region", ["", "eu"])
def test_peers_without_a_region_share_no_link_for_any_region_of_the_hub(region):
    members = Membership(1, 350e6, region=region)
    for name in "abcdefghijkl":
        members.join(peer(name), 0.0)
    assert sorted(map(len, members.plan.chains)) == [4, 4, 4]
    members.replan(0.0)
    assert sorted(map(len, members.plan.chains)) == [4, 4, 4]


@pytest.mark.parametrize(("peers", "once"), [(30, True), (60, False)])
def test_a_region_is_entered_once_as_long_as_its_hops_are_no_wait(peers, once):
    """A hop takes a piece on each of four stripes: 21 ms of 256 KiB at 100 Mbit/s, and half a round trip. The last of
    60 would have it more than a second later.
    """
    members = Membership(1, 1e9)
    for n in range(peers):
        members.join(peer(str(n), "eu"), 0.0)
    for now in range(4):
        members.replan(float(now))
    assert (len(members.plan.children(ROOT)) == 1) is once


def test_a_hub_with_a_region_feeds_its_neighbours_as_many_ways_as_its_link_allows():
    apart, beside = (Membership(1, 350e6, region=region) for region in ("", "lab"))
    for members in (apart, beside):
        for name in "abcdef":
            members.join(peer(name, "lab"), 0.0)
    assert len(apart.plan.children(ROOT)) == 1
    assert len(beside.plan.children(ROOT)) == 3


def fails(members: Membership, name: str, now: float, times: int = 1) -> None:
    """The peer is lost and returns, ``times`` times."""
    for _ in range(times):
        members.leave(ident(name), now, failed=True)
        members.join(peer(name), now)


def broadcast(members: Membership, now: float) -> bool:
    for one in members.peers:
        members.note_transfer(one, now, 1000, 0.1)
    return members.replan(now)


def test_a_failing_peer_becomes_a_leaf_until_recovered():
    members = joined("abcd")
    for now in range(30):
        fails(members, "b", float(now), 2)
        broadcast(members, float(now))
    assert members.standing(ident("b")) is Standing.LEAF
    assert members.standing(ident("a")) is Standing.HEAD
    assert ident("b") in members.plan.leaves
    fails(members, "b", 30.0)
    assert ident("b") in members.plan.leaves, "coming back does not make it new"
    for now in range(31, 600):
        broadcast(members, float(now))
    assert members.standing(ident("b")) is Standing.HEAD
    assert ident("b") not in members.plan.leaves


def test_a_head_whose_score_fell_without_its_rate_loses_its_place():
    """Failures are reported while the peer keeps its place: they change no predicted time."""
    members = joined("abc")
    for now in range(10):
        broadcast(members, float(now))
    head = members.peers[ident("a")]
    assert links(members)["a"] == ""
    moved = []
    for now in range(10, 30):
        head.transfers = head.transfers.record(float(now), 0, 0.0, False)
        if broadcast(members, float(now)):
            moved.append(links(members))
    assert members.standing(ident("a")) >= Standing.MIDDLE
    assert moved, "the plan was changed"
    assert moved[0] == {"b": "", "c": "b", "a": "c"}
    assert len(moved) <= 2, "once to the tail, perhaps once more as a leaf"


def test_full_speed_is_the_fastest_peers_or_the_stated_rate():
    for cap_bps, expected in ((None, 8e9), (1e9, 1e9)):
        members = Membership(1, GBIT, cap_bps=cap_bps)
        for name in "ab":
            members.join(peer(name), 0.0)
        assert members.speed_cap_bps == (cap_bps or 1e8)
        members.note_transfer(ident("a"), 1.0, 10**9, 1.0)
        members.note_transfer(ident("b"), 1.0, 10**8, 1.0)
        assert members.speed_cap_bps == expected
        a, b = (members.score(ident(name), 1.0) for name in "ab")
        assert a.speed == 100.0
        assert b.speed < 100.0
        members.leave(ident("a"), 2.0)
        assert members.speed_cap_bps == (cap_bps or 8e8)
