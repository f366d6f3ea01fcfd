"""Connections to a lead that break the protocol, take a used name, or answer late."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgpack
import pytest
from engine_hosts import LIMIT_S, ONE, REPORT, TOKEN, TWO, Host, seen, together

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, P2PCastError, RefusedError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from tests.support.until import until


class Knocker(QuietOwner):
    """A node that dials a lead and sends a test's messages."""

    def __init__(self) -> None:
        self.error: P2PCastError | None = None
        self.said: list[Any] = []
        self.closed = False

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None:
        self.said.append(event)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.error, self.closed = error, True


async def knock(lead: Host, node: bytes = b"k" * 16, **hello: Any) -> tuple[Knocker, Link]:
    knocker = Knocker()
    given = {"purpose": "engine", "role": "member"} | hello
    link = await dial(knocker, *lead.listener.address, Identity(node, "knocker", TOKEN), **given)
    return knocker, link


async def turned_away(lead: Host, **hello: Any) -> P2PCastError | None:
    """Before or after the dialler has noticed that it is through."""
    try:
        knocker, link = await knock(lead, **hello)
    except P2PCastError as error:
        return error
    link.send(messages.Ping(1))
    await until(lambda: knocker.closed)
    return knocker.error


def member_of(engine: str = "big") -> messages.Member:
    return messages.Member(engine, bytes(16))


HELD = messages.Held(ONE, still=True, round=0)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([HELD], "MEMBER comes first"),
        ([messages.WorkerReport(b"\x80", 0)], "MEMBER comes first"),
        ([member_of(), member_of()], "MEMBER comes first, and once"),
        ([member_of("other")], "this peer leads the engine big, not other"),
        ([member_of(), messages.WorkerReport(b"\xc1", 0)], "not msgpack"),
        ([member_of(), messages.WorkerReport(b"\x80", 0)], "'engine' is missing"),
        (
            [
                member_of(),
                messages.WorkerReport(msgpack.packb(REPORT | {"rank": "1"}), 0),
            ],
            "'rank'",
        ),
        (
            [
                member_of(),
                messages.WorkerReport(msgpack.packb(REPORT | {"error": 5}), 0),
            ],
            "'error'",
        ),
    ],
)
async def test_a_member_that_breaks_the_protocol_is_disconnected_alone(hosts, frames, why):
    lead, b = await together(hosts, "b")
    knocker, link = await knock(lead)
    for record in frames:
        link.send(record)
    await until(lambda: knocker.closed)
    assert why in str(knocker.error)
    await until(lambda: set(seen(lead)) == {"b"})
    await b.says(rank=1)
    await until(lambda: lead.reports)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


@pytest.mark.parametrize("hello", [{"role": "child"}, {"role": "peer"}, {"role": "rank"}])
async def test_only_members_may_join(hosts, hello):
    lead = await hosts("lead", "a", ONE)
    error = await turned_away(lead, **hello)
    assert isinstance(error, RefusedError)
    assert "accepts members only" in str(error)


async def test_a_member_of_another_engine_reports_the_reason(hosts):
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", ONE, engine="other")
    b.member.set_lead(lead.place)
    await until(lambda: "this peer leads the engine big, not other" in str(b.member.status()["error"]))
    assert seen(lead) == {}


async def test_there_are_only_so_many_seats(hosts, monkeypatch):
    monkeypatch.setattr(limits, "MAX_MEMBERS", 2)
    lead = await hosts("lead", "a", ONE)
    early = [await knock(lead, bytes([n]) * 16) for n in (1, 2)]
    assert "has 2 members already" in str(await turned_away(lead))
    early[0][1].close()
    await until(lambda: len(lead.lead._links) == 1)
    knocker, link = await knock(lead)
    link.send(member_of())
    await until(lambda: set(seen(lead)) == {"knocker"})
    assert not knocker.closed


async def test_a_second_connection_of_a_member_replaces_the_first(hosts):
    lead = await hosts("lead", "a", ONE)
    first, one = await knock(lead)
    one.send(member_of())
    one.send(HELD)
    await until(lambda: seen(lead) and seen(lead)["knocker"]["staged"])
    _, two = await knock(lead)
    two.send(member_of())
    await until(lambda: first.closed and "here again" in str(first.error))
    assert seen(lead)["knocker"]["staged"] is None
    two.send(HELD)
    await until(lambda: seen(lead)["knocker"]["staged"] == "0.1")


async def test_an_answer_to_an_older_round_is_none(hosts):
    lead = await hosts("lead", "a", ONE)
    lead.lead.begin()
    knocker, link = await knock(lead)
    link.send(member_of())
    link.send(HELD)
    await until(lambda: seen(lead) and seen(lead)["knocker"]["staged"])
    assert not seen(lead)["knocker"]["still"]
    stills = lambda: [e.body for e in knocker.said if isinstance(e.body, messages.Freeze)]  # noqa: E731
    await until(stills)
    link.send(dataclasses.replace(HELD, round=stills()[-1].round))
    await until(lambda: seen(lead)["knocker"]["still"])
    await lead.move(TWO)
    assert not seen(lead)["knocker"]["still"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": limits.MAX_RANKS},
        {"rank": -1},
        {"rank": True},
        {"ranks": 0},
        {"ranks": "2"},
        {"ranks": limits.MAX_RANKS + 1},
    ],
)
async def test_ranks_beyond_reason_are_refused(hosts, wrong):
    lead, b = await together(hosts, "b")
    with pytest.raises(RemoteError, match="a report's rank must be from 0"):
        await b.says(**wrong)
    with lead.socket.expect(lambda r: True, 2):
        link = b.member._link
        link.send(messages.WorkerReport(msgpack.packb(REPORT | wrong), 0))
        await until(lambda: link.closed)
    await until(lambda: set(seen(lead)) == {"b"})
    assert seen(lead)["b"]["ranks"] == [1]


async def test_errors_of_versions_off_the_wire_close_the_link(hosts):
    lead = await hosts("lead", "a", ONE)
    knocker, link = await knock(lead)
    link.send(member_of())
    link.send(dataclasses.replace(HELD, version=Version(0, -1)))
    await until(lambda: knocker.closed)
    assert isinstance(knocker.error, RemoteError | IntegrityError)


async def test_a_connection_without_a_member_message_is_closed(hosts, monkeypatch):
    lead = await hosts("lead", "a", ONE)
    monkeypatch.setattr(limits, "FIRST_MESSAGE_S", 0.05)
    assert "no MEMBER within" in str(await turned_away(lead))
