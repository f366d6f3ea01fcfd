"""Members and their parents, without sockets or clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.codec.codec_prediction import PEER_CORES
from p2pcast.relay.child_lag import Inflow
from p2pcast.wire.messages import Report
from topology.broadcast_time import DEFAULT_PEER_BPS
from topology.plan_tree import ROOT, Plan
from topology.reachability import FORGET_S, Contact
from topology.score_demotion import Standing
from topology.slow_peers import SUSTAINED
from trainer_node.membership import membership
from trainer_node.membership.membership import RATED_BYTES, REPAIR_S, Membership
from trainer_node.membership.peer_record import PeerRecord

GBIT = 1e9


def peer(name: str, region: str = "") -> PeerRecord:
    return PeerRecord(name.encode().hex(), name, region, "host", 1, 0.0)


def ident(name: str) -> str:
    return name.encode().hex()


def joined(names: str, chains: int | None = 1, incarnation: int = 1) -> Membership:
    members = Membership(incarnation, GBIT, chains)
    for name in names:
        members.join(peer(name), 0.0)
    return members


def links(members: Membership) -> dict[str, str]:
    return {bytes.fromhex(p).decode(): bytes.fromhex(above).decode() for p, above in members.plan.parent.items()}


def test_a_new_peer_goes_to_the_tail_and_no_peer_moves():
    members = joined("abc")
    assert links(members) == {"a": "", "b": "a", "c": "b"}
    before, epoch = links(members), members.plan.epoch
    members.join(peer("d"), 1.0)
    assert links(members) == before | {"d": "c"}
    assert members.plan.epoch > epoch


def test_only_the_orphans_of_the_dead_move():
    members = joined("abcd")
    members.leave(ident("b"), 1.0, failed=True)
    assert links(members) == {"a": "", "c": "a", "d": "c"}
    members.leave(ident("a"), 1.0)
    assert links(members) == {"c": "", "d": "c"}
    members.leave(ident("nobody"), 1.0)
    assert len(members.plan) == 2


def test_a_peer_that_joins_twice_is_there_once():
    members = joined("ab")
    members.join(peer("a"), 1.0)
    assert sorted(links(members)) == ["a", "b"]
    assert members.plan.parent[ident("b")] in (ROOT, ident("a"))


def test_a_peers_own_move_is_accepted():
    members = joined("abc")
    epoch = members.plan.epoch
    members.peers[ident("c")].sent_epoch = epoch
    assert members.note_parent(ident("c"), ident("a"), epoch)
    assert links(members) == {"a": "", "b": "a", "c": "a"}
    assert members.plan.epoch > epoch
    assert members.peers[ident("c")].parent == ident("a")


def test_a_report_from_before_the_newest_plan_is_not():
    members = joined("abc")
    members.peers[ident("c")].sent_epoch = members.plan.epoch
    plan = members.plan
    assert not members.note_parent(ident("c"), ident("a"), (1, 0))
    assert members.plan is plan


def test_a_report_that_matches_the_plan_changes_nothing():
    members = joined("ab")
    plan = members.plan
    assert not members.note_parent(ident("b"), ident("a"), plan.epoch)
    assert members.plan is plan


def test_impossible_reports_are_not_adopted():
    members = joined("abcd")
    plan, epoch = members.plan, members.plan.epoch
    assert not members.note_parent(ident("a"), ident("c"), epoch)  # a loop
    assert not members.note_parent(ident("c"), ident("stranger"), epoch)
    assert not members.note_parent(ident("stranger"), ident("a"), epoch)
    assert members.plan is plan
    assert members.note_parent(ident("c"), ident("a"), epoch)
    assert not members.note_parent(ident("d"), ident("a"), members.plan.epoch)  # feeds two already


def test_epochs_of_a_restarted_hub_are_newer():
    before = joined("abcdef", incarnation=3)
    after = joined("", incarnation=4)
    assert after.plan.epoch > before.plan.epoch
    after.join(peer("a"), 0.0)
    assert after.plan.epoch > before.plan.epoch


def test_a_peer_that_flaps_keeps_its_history():
    members = joined("ab")
    members.note_transfer(ident("a"), 1.0, 10 * RATED_BYTES, 1.0)
    good = members.score(ident("a"), 1.0)
    assert good is not None
    for _ in range(4):
        members.leave(ident("a"), 1.0, failed=True)
        members.join(peer("a"), 1.0)
    worse = members.score(ident("a"), 1.0)
    assert worse is not None
    assert worse.total < good.total
    assert worse.speed == good.speed
    assert worse.stability == 0.0


def test_history_is_bounded(monkeypatch):
    monkeypatch.setattr(membership, "MAX_HISTORY", 2)
    members = joined("abc")
    for name in "abc":
        members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 1.0)
    for name in "abc":
        members.leave(ident(name), 1.0)
    for name in "abc":
        members.join(peer(name), 1.0)
    assert [members.peers[ident(n)].transfers.good for n in "abc"] == [0, 1, 1]


def test_leaving_well_is_no_failure():
    members = joined("a")
    members.note_transfer(ident("a"), 1.0, 10 * RATED_BYTES, 1.0)
    before = members.score(ident("a"), 2.0)
    members.leave(ident("a"), 2.0)
    members.join(peer("a"), 2.0)
    assert members.score(ident("a"), 2.0) == before


def test_small_transfers_say_nothing_about_the_rate():
    members = joined("a")
    members.note_transfer(ident("a"), 1.0, RATED_BYTES - 1, 1.0)
    assert members.peers[ident("a")].transfers.bps is None
    members.note_transfer(ident("a"), 1.0, RATED_BYTES, 1.0)
    assert members.peers[ident("a")].transfers.bps == 8 * RATED_BYTES


def test_replanning_changes_nothing_without_a_reason():
    members = joined("abcd")
    plan = members.plan
    assert not members.replan(1.0)
    assert members.plan is plan


def test_a_slow_head_is_moved_to_the_end():
    members = joined("abcd")
    for name, rate in zip("abcd", (2, 100, 100, 100), strict=True):
        for _ in range(5):
            members.note_transfer(ident(name), 1.0, rate * RATED_BYTES, 1.0)
    epoch = members.plan.epoch
    assert [members.replan(2.0) for _ in range(4)] == [False, False, True, False]  # only what lasts counts
    assert members.plan.epoch > epoch
    assert members.plan.children(ident("a")) == ()


ACTIONS = st.tuples(
    st.sampled_from(["join", "leave", "fail", "move", "measure", "replan"]),
    st.sampled_from("abcdef"),
    st.integers(0, 6),
)


@given(st.lists(ACTIONS, max_size=60), st.sampled_from([None, 1, 2]))
def test_all_members_are_in_the_plan_and_epochs_grow_in_any_history(actions, chains):
    members = Membership(1, GBIT, chains)
    epoch = members.plan.epoch
    for now, (what, name, number) in enumerate(actions):
        plan = members.plan
        if what == "join":
            members.join(peer(name), now)
        elif what in ("leave", "fail"):
            members.leave(ident(name), now, failed=what == "fail")
        elif what == "move":
            members.note_parent(ident(name), (ROOT, *map(ident, "abcdef"))[number], members.plan.epoch)
        elif what == "measure":
            members.note_transfer(ident(name), now, (number + 1) * RATED_BYTES, 1.0)
        else:
            members.replan(now)
        assert set(members.plan.parent) == set(members.peers)
        assert members.plan.epoch >= epoch
        if dict(members.plan.parent) != dict(plan.parent):
            assert members.plan.epoch > plan.epoch
        epoch = members.plan.epoch


def test_the_way_is_that_of_the_slowest():
    members = joined("abc")
    for name, bps in (("a", 400e6), ("b", 80e6), ("c", 200e6)):
        members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / bps)
    members.peers[ident("a")].report = Report(None, None, None, cores=64)
    members.peers[ident("b")].report = Report(None, None, None, cores=8)
    members.peers[ident("c")].report = Report(None, None, None, cores=12)
    way = members.way(2.0, 4)
    assert way.link_bps == pytest.approx(80e6)
    assert (way.encode_cores, way.decode_cores) == (4, 8)


def test_heads_share_the_uplink_on_the_way():
    members = Membership(1, GBIT)
    for name in "abcd":
        members.join(peer(name), 0.0)
        members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / (10 * GBIT))
    members.replan(2.0)
    assert members.way(2.0, 4).link_bps == pytest.approx(GBIT / len(members.plan.chains))


def test_of_peers_that_say_nothing_the_usual_is_taken():
    members = Membership(1, GBIT)
    assert (members.way(0.0, 4).link_bps, members.way(0.0, 4).decode_cores) == (
        pytest.approx(DEFAULT_PEER_BPS),
        PEER_CORES,
    )
    members = joined("a")
    members.peers[ident("a")].report = Report(None, None, None)
    assert (members.way(0.0, 4).link_bps, members.way(0.0, 4).decode_cores) == (
        pytest.approx(DEFAULT_PEER_BPS),
        PEER_CORES,
    )


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
    assert members.plan.depth_of(ident("e")) >= 6, "who stays slow is last"
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
    assert not members.repair(100.0 + 2 * REPAIR_S - 0.1), "who cannot reach its parent must not be sent there for ever"
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
