"""What the hub tells peers of one another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.events import Events
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Type
from p2pcast.wire.token import Token
from trainer_node.fleet import Fleet
from trainer_node.guide import Guide
from trainer_node.membership import Membership
from trainer_node.peer import Peer
from trainer_node.session import Session

IDENTITY = Identity(bytes(16), "hub", Token(bytes(16), bytes(20)))
UPLINK_BPS = 100e6


class Wire:
    """A link that writes down what is sent."""

    def __init__(self, name: str) -> None:
        self.remote = node(name)
        self.sent: list[tuple[Type, Any]] = []

    def send(self, kind: Type, body: Any) -> None:
        self.sent.append((kind, body))

    def kinds(self) -> list[Type]:
        found, self.sent = [kind for kind, _ in self.sent], []
        return found


def node(name: str) -> bytes:
    return name.encode() * 16


@pytest.fixture
async def swarm() -> SimpleNamespace:
    """Three in one chain, told of their places."""
    membership, events, sessions, wires = Membership(1, UPLINK_BPS, 1), Events(), {}, {}
    for name in "abc":
        wires[name] = Wire(name)
        session = Session(wires[name], SimpleNamespace())  # type: ignore[arg-type]
        session.peer = Peer(node(name).hex(), name, "", "127.0.0.1", 1, 0.0)
        membership.join(session.peer, 0.0)
        sessions[session.peer.ident] = session
    guide = Guide(membership, sessions, Fleet(events), events, IDENTITY, None)
    guide.send_plans()
    for wire in wires.values():
        assert Type.PLAN in wire.kinds()
    return SimpleNamespace(guide=guide, membership=membership, events=events, sessions=sessions, wires=wires)


def garbled(events: Events) -> list[tuple[str, str, bool]]:
    found = events.after(0)[1]
    return [(e.facts["witness"], e.facts["peer"], e.facts["quarantined"]) for e in found if e.kind == "garbled"]


async def test_nothing_is_told_twice(swarm):
    swarm.guide.send_plans()
    assert all(wire.kinds() == [] for wire in swarm.wires.values())


async def test_who_spoils_pieces_feeds_nobody_and_that_is_said_once_for_each_verdict(swarm):
    a, b, c = (swarm.sessions[node(name).hex()].peer for name in "abc")
    for pieces in range(1, 50):
        swarm.guide.garbled(c, [(node("b"), pieces)], 1.0)
    assert garbled(swarm.events) == [("c", "b", False)]
    assert b.ident not in swarm.membership.plan.parent.values()
    assert Type.PLAN in swarm.wires["c"].kinds()
    for pieces in range(1, 50):
        swarm.guide.garbled(a, [(node("b"), pieces)], 2.0)
    assert garbled(swarm.events) == [("c", "b", False), ("a", "b", True)]


async def test_whom_nobody_knows_cannot_be_called(swarm):
    swarm.guide.called(swarm.sessions[node("c").hex()], {"node": node("x"), "stripes": 1})
    assert swarm.wires["c"].sent == [(Type.UNREACHED, {"node": node("x")})]
