"""Members and their parents, without sockets or clocks: joins, departures, own moves, the planned way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lettered_members import GBIT, ident, joined, links, peer

from p2pcast.artifact.piece_size import WIDE_BPS, WIDE_PIECE_BYTES
from p2pcast.codec.codec_prediction import PEER_CORES
from p2pcast.ground.limits import PIECE_BYTES
from p2pcast.transport.stripe_count import FEWEST
from p2pcast.wire.messages import Report
from topology.broadcast_time import DEFAULT_PEER_BPS
from topology.plan_tree import ROOT
from trainer_node.membership import membership
from trainer_node.membership.membership import RATED_BYTES, Membership


def test_a_new_peer_goes_to_the_tail_and_no_peer_moves():
    members = joined("abc")
    assert links(members) == {"a": "", "b": "a", "c": "b"}
    before, epoch = links(members), members.plan.epoch
    members.join(peer("d"), 1.0)
    assert links(members) == before | {"d": "c"}
    assert members.plan.epoch > epoch


def test_a_version_has_pieces_for_the_plan_that_the_last_one_began_with():
    members = joined("abcdefghijklmnopqrstuvwxyz")
    flat = members._network.piece_bytes
    members.begin_version()
    assert members.sizes.hops == 26
    assert members._network.piece_bytes < flat
    for name in "abcdefghijklmnopqrstuvwxyz":
        members.leave(ident(name), 1.0)
    members.begin_version()
    assert members.sizes.hops == 1


def test_pieces_are_larger_while_each_peer_is_known_to_receive_at_the_rate_of_a_wide_link():
    members = joined("ab")
    members.sizes.bytes = 1 << 30

    def piece(**rates: float) -> int:
        for name, rate in rates.items():
            members.note_transfer(ident(name), 1.0, 10 * RATED_BYTES, 8 * 10 * RATED_BYTES / (rate * WIDE_BPS))
        members.replan(2.0)
        members.begin_version()
        return members._network.piece_bytes // FEWEST

    assert piece() == PIECE_BYTES
    assert piece(a=2) == PIECE_BYTES
    assert piece(a=2, b=2) == WIDE_PIECE_BYTES
    assert piece(a=2, b=0.5) == PIECE_BYTES
    assert piece(a=2, b=2) == WIDE_PIECE_BYTES
    members.join(peer("c"), 3.0)
    assert piece() == PIECE_BYTES


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
