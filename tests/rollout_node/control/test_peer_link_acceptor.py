from __future__ import annotations

from types import SimpleNamespace

import pytest
from recorder import Recorder

from p2pcast.ground.errors import RefusedError, RemoteError, RetryableError
from rollout_node.control.peer_link_acceptor import PeerLinkAcceptor, Receivers


def begun(lead=None):
    acceptor = PeerLinkAcceptor()
    receivers = Receivers(Recorder(), Recorder(), lead, lambda: ["a link"])
    acceptor.begin(receivers)
    return acceptor, receivers


def hello(purpose="data", role="child"):
    return SimpleNamespace(purpose=purpose, role=role)


def test_before_the_peer_is_built_links_are_turned_away():
    acceptor = PeerLinkAcceptor()
    with pytest.raises(RetryableError, match="not joined yet"):
        acceptor.accept_link(Recorder(), hello())
    with pytest.raises(RefusedError, match="leads no engine"):
        acceptor.accept_link(Recorder(), hello("engine"))
    assert list(acceptor.links()) == []


def test_a_child_goes_to_the_downstream_and_a_parent_to_the_connector():
    acceptor, receivers = begun()
    child, parent = Recorder(owner=None), Recorder(owner=None)
    acceptor.accept_link(child, hello())
    acceptor.accept_link(parent, hello(role="parent"))
    assert child.owner is receivers.downstream
    assert receivers.downstream.named("accept") == [child]
    assert receivers.connector.named("accept") == [(parent, hello(role="parent"))]
    assert acceptor.links() == ["a link"]


def test_members_go_to_the_lead_alone():
    acceptor, receivers = begun(Recorder())
    acceptor.accept_link(Recorder(), hello("engine"))
    assert receivers.lead.names == ["accept"]
    acceptor, _ = begun()
    with pytest.raises(RefusedError, match="leads no engine"):
        acceptor.accept_link(Recorder(), hello("engine"))


def test_a_peer_takes_no_control_connections():
    acceptor, _ = begun()
    with pytest.raises(RemoteError, match="dial the hub"):
        acceptor.accept_link(Recorder(), hello("control"))
