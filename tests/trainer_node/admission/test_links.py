"""The part that takes over a new connection, and the connections that an eviction ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from parts import FakeLink, ident, node, record_of

from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError
from p2pcast.wire.messages import Type
from trainer_node.admission.hub_links import EvictionEnforcer, LinkAcceptor
from trainer_node.membership.peer_session import PeerSession, Sessions


@pytest.fixture
def taken():
    """The acceptor, and which part took each link."""
    calls = []
    children = SimpleNamespace(accept=lambda link: calls.append("children"))
    ranks = SimpleNamespace(accept=lambda link, hello: calls.append("ranks"))
    enrolment = SimpleNamespace(accept=lambda link, hello: calls.append("enrolment"))
    made = LinkAcceptor(children, ranks, enrolment, lambda link, token: ("session", token))
    return SimpleNamespace(acceptor=made, calls=calls, children=children)


@pytest.mark.parametrize(("purpose", "part"), [("publish", "ranks"), ("enrol", "enrolment"), ("data", "children")])
def test_a_link_goes_to_the_part_that_its_hello_names(taken, purpose, part) -> None:
    link = FakeLink()
    taken.acceptor.accept_link(link, record_of(Type.HELLO, purpose=purpose, role="child"))
    assert taken.calls == [part]
    assert (link.owner is taken.children) == (part == "children")


def test_a_control_link_gets_a_session_and_has_to_join(taken) -> None:
    link = FakeLink()
    taken.acceptor.accept_link(link, record_of(Type.HELLO, purpose="control", token=b"t"))
    assert link.owner == ("session", b"t")
    assert link.first_word == "JOIN"


@pytest.mark.parametrize("hello", [{"purpose": "data", "role": "parent"}, {"purpose": "engine", "role": "peer"}])
def test_a_hub_has_no_parent_and_leads_no_engine(taken, hello) -> None:
    with pytest.raises(RefusedError):
        taken.acceptor.accept_link(FakeLink(), record_of(Type.HELLO, **hello))
    assert taken.calls == []


async def test_an_eviction_closes_every_connection_of_the_node_and_tells_all_peers() -> None:
    sessions, leads, dropped = Sessions(), [], []
    for name in "ab":
        sessions[ident(name)] = PeerSession(FakeLink(name), None)
    child, other = FakeLink("a"), FakeLink("b")
    connections = SimpleNamespace(drop=lambda nodes, error: dropped.append((nodes, str(error))))
    enforcer = EvictionEnforcer(sessions, SimpleNamespace(evict=leads.append), connections, [child, other])
    signed = [b"s"] * (limits.MAX_STATEMENTS + 1)
    enforcer.enforce(frozenset([node("a")]), signed)
    assert sessions[ident("a")].farewell
    assert not sessions[ident("b")].farewell
    assert leads == [frozenset([node("a")])]
    assert dropped == [(frozenset([node("a")]), "this node was evicted from the run")]
    assert (child.closed, other.closed) == (True, False)
    link: Any = sessions[ident("b")].link
    sizes = [len(body["signed"]) for body in link.bodies(Type.EVICTED)]
    assert sizes == [limits.MAX_STATEMENTS, 1]
