"""The part that takes over a new connection, the first messages to a peer, and connections that an eviction ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from parts import FakeLink, ident, node, record_of

from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Catalog, Evicted, Hold, Type, Welcome
from trainer_node.admission.hub_links import EvictionEnforcer, HubLinkAcceptor, WelcomeMessages
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, Sessions


@pytest.fixture
def taken():
    """The acceptor, and which part took each link."""
    calls = []
    children = SimpleNamespace(accept=lambda link: calls.append("children"))
    ranks = SimpleNamespace(accept=lambda link, hello: calls.append("ranks"))
    enrolment = SimpleNamespace(accept=lambda link, hello: calls.append("enrolment"))
    made = HubLinkAcceptor(children, ranks, enrolment, lambda link, token: ("session", token))
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


@pytest.mark.parametrize("plaintext", [True, False])
@pytest.mark.parametrize("target", [None, Version(1, 2)])
async def test_a_welcome_lists_its_facts_in_order(plaintext, target) -> None:
    told, hold = SimpleNamespace(version=target), Hold(Version(1, 2))
    commits = SimpleNamespace(mode="barrier", target=told, greeting=lambda: [hold])
    trust = SimpleNamespace(bearer_of=lambda node: "bearer", evictions=lambda: [Evicted([], [])] * 2)
    welcome = WelcomeMessages(
        b"key", commits, trust, epoch=lambda: (3, 4), catalog=lambda: Catalog([], []), plaintext=plaintext
    )
    session = PeerSession(FakeLink("a", "192.0.2.7"), None)
    session.peer = PeerRecord("aa", "given", "", "host", 1, 0.0)
    messages = welcome.messages(session)
    assert [type(message) for message in messages] == [Welcome, Evicted, Evicted, Catalog, Hold]
    assert messages[0] == Welcome(
        key=b"key",
        epoch=(3, 4),
        commit="barrier",
        target=target,
        host="192.0.2.7",
        bearer=None if plaintext else "bearer",
        name="given",
    )
