"""What becomes of a peer that passes nothing on, in the plan."""

from __future__ import annotations

from topology.withholding import GRACE_S
from trainer_node.membership import Membership
from trainer_node.peer import Peer

VERSION = bytes(16)


def chain(names: str) -> Membership:
    members = Membership(1, 1e9, 1)
    for name in names:
        members.join(Peer(name, name, "", "host", 1, 0.0), 0.0)
    return members


def test_a_parent_that_withholds_goes_to_a_tail_and_feeds_nobody():
    members = chain("abc")
    members.lacks("c", [(VERSION, "b")], 1.0)
    assert members.withheld(1.0 + GRACE_S) == [("b", "c")]
    assert members.plan.children("b") == ()
    assert members.plan.parent["c"] == "a"
    assert members.muted(2.0 + GRACE_S) == {"b"}


def test_a_peer_can_complain_of_its_own_parent_alone():
    members = chain("abc")
    members.lacks("c", [(VERSION, "a")], 1.0)
    assert members.withheld(1.0 + GRACE_S) == []
    assert members.muted(2.0 + GRACE_S) == frozenset()
