"""The place in the plan of a peer that forwards nothing."""

from __future__ import annotations

from topology.withholding import GRACE_S
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord

VERSION = bytes(16)


def chain(names: str) -> Membership:
    members = Membership(1, 1e9, 1)
    for name in names:
        members.join(PeerRecord(name, name, "", "host", 1, 0.0), 0.0)
    return members


def test_a_withholding_parent_moves_to_a_tail_and_feeds_no_peer():
    members = chain("abc")
    members.note_lacking("c", [(VERSION, "b")], 1.0)
    assert members.judge_withholding(1.0 + GRACE_S) == [("b", "c")]
    assert members.plan.children("b") == ()
    assert members.plan.parent["c"] == "a"
    assert members.demoted(2.0 + GRACE_S) == {"b"}


def test_a_report_of_lacking_artifacts_counts_against_the_own_parent_alone():
    members = chain("abc")
    members.note_lacking("c", [(VERSION, "a")], 1.0)
    assert members.judge_withholding(1.0 + GRACE_S) == []
    assert members.demoted(2.0 + GRACE_S) == frozenset()
