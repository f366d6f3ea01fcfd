"""Leads of engines on several hosts: remembered, sent to members, released by an eviction."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from parts import Background, FakeLink, ident, in_thread, node

from p2pcast.ground.errors import RefusedError
from p2pcast.wire.messages import Type
from trainer_node.membership.lead_directory import LEADS, LeadDirectory


class Hub:
    def __init__(self, background: Background, claims: dict[str, str] | None = None) -> None:
        self.sessions: dict[str, Any] = {}
        self.writes = 0
        self.memory: Any = SimpleNamespace(facts={LEADS: claims or {}}, update=self._write)
        self.ways: list[tuple[str, int]] = []
        reach: Any = SimpleNamespace(ways=lambda dialler, other: self.ways)
        self.leads = LeadDirectory(self.sessions, reach, self.memory, later=background, in_thread=in_thread)
        self.leads.recall()

    def _write(self) -> None:
        self.writes += 1

    def join(self, name: str, role: str, now: float = 0.0) -> FakeLink:
        link = FakeLink(name)
        peer: Any = SimpleNamespace(ident=ident(name), name=name, place=(node(name), "192.0.2.1", 7))
        self.leads.join(peer, ("engine", role), now)
        self.sessions[ident(name)] = SimpleNamespace(link=link)
        self.leads.send_leads()
        return link


@pytest.fixture
def make(background: Background) -> Callable[..., Hub]:
    return lambda claims=None: Hub(background, claims)


async def test_a_lead_is_remembered_on_disk(make: Callable[..., Hub], background: Background) -> None:
    hub = make()
    hub.join("a", "lead")
    await background.settle()
    assert hub.memory.facts[LEADS] == {"engine": ident("a")}
    assert hub.writes == 1
    hub.join("b", "member")
    await background.settle()
    assert hub.writes == 1, "members are no claims"


async def test_after_a_restart_the_name_is_reserved_for_the_last_lead(make: Callable[..., Hub]) -> None:
    hub = make({"engine": ident("a")})
    with pytest.raises(RefusedError):
        hub.join("b", "lead")
    hub.join("a", "lead")


async def test_a_member_gets_its_lead_at_an_address_that_the_member_can_dial(make: Callable[..., Hub]) -> None:
    hub = make()
    lead = hub.join("a", "lead")
    hub.ways = [("198.51.100.1", 8)]
    member = hub.join("b", "member")
    (body,) = member.bodies(Type.ENGINE)
    assert tuple(body["lead"]) == (node("a"), "198.51.100.1", 8)
    assert lead.bodies(Type.ENGINE)[-1]["members"] == [node("b")]
    sent = len(member.sent), len(lead.sent)
    hub.leads.send_leads()
    assert (len(member.sent), len(lead.sent)) == sent, "only changes are sent"


async def test_an_evicted_lead_releases_the_name(make: Callable[..., Hub], background: Background) -> None:
    hub = make()
    hub.join("a", "lead")
    hub.leads.evict([node("a")])
    hub.sessions.clear()
    await background.settle()
    assert hub.memory.facts[LEADS] == {}
    hub.join("b", "lead")
