"""The first messages to a peer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from parts import FakeLink

from p2pcast.ground.version import Version
from p2pcast.wire.messages import Catalog, Evicted, Hold, Welcome
from trainer_node.admission.hub_links import WelcomeMessages
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession


@pytest.mark.parametrize("plaintext", [True, False])
@pytest.mark.parametrize("target", [None, Version(1, 2)])
async def test_a_welcome_lists_its_facts_in_order(plaintext, target) -> None:
    commits = SimpleNamespace(mode="barrier", target=target, greeting=lambda: [Hold(Version(1, 2))])
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
