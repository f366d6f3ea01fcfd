"""A control connection: which message goes to which handler, and what is sent only once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from parts import FakeLink, node, record_of

from p2pcast.ground.errors import RefusedError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, SessionHandlers, Sessions


class Calls:
    """Records the name of every method that is called."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        def called(*args: object, **named: object) -> None:
            self.made.append(name)
            if self.fails:
                raise RefusedError("by a test")

        return called


@pytest.fixture
async def side() -> SimpleNamespace:
    link, handler, routes = FakeLink("a"), Calls(), Calls()
    handlers = SessionHandlers(handler, handler, routes, handler, handler)
    session = PeerSession(link, handlers, b"token")
    link.owner = session
    return SimpleNamespace(link=link, handler=handler, routes=routes, session=session)


def joined(side: SimpleNamespace) -> PeerSession:
    side.session.peer = PeerRecord("aa", "a", "", "host", 1, 0.0)
    return side.session


@pytest.mark.parametrize(
    ("kind", "body", "of", "call"),
    [
        (Type.REPORT, {}, "handler", "on_report"),
        (Type.SQUASH, {}, "handler", "ask"),
        (Type.ENROL, {}, "handler", "renew_later"),
        (Type.CALL, {}, "routes", "on_dial_request"),
        (Type.UNREACHABLE, {"node": b""}, "routes", "on_unreachable"),
        (Type.FIND_SOURCES, {}, "routes", "on_source_request"),
    ],
)
async def test_a_message_goes_to_its_handler_once_its_peer_has_joined(side, kind, body, of, call) -> None:
    side.link.hears(kind, **body)
    assert "before JOIN" in str(side.link.error)
    assert (side.handler.made, side.routes.made) == (["on_closed"], [])
    joined(side)
    side.link.hears(kind, **body)
    assert getattr(side, of).made[-1] == call


async def test_a_squash_is_promised_or_not(side, monkeypatch) -> None:
    joined(side)
    side.link.hears(Type.SQUASH, base=Version(0, 1))
    promise = SimpleNamespace(version=Version(0, 5), bytes=100, wait_s=0.5)
    monkeypatch.setattr(side.handler, "ask", lambda base, node: promise, raising=False)
    side.link.hears(Type.SQUASH, base=Version(0, 1))
    assert side.link.bodies(Type.SQUASHING) == [
        {"base": [0, 1], "version": None, "bytes": 0, "wait_us": 0},
        {"base": [0, 1], "version": [0, 5], "bytes": 100, "wait_us": 500_000},
    ]


async def test_join_comes_once(side) -> None:
    side.link.hears(Type.JOIN)
    assert side.handler.made == ["on_join"]
    joined(side)
    side.link.hears(Type.JOIN)
    assert "JOIN came twice" in str(side.link.error)


async def test_a_ping_is_answered_at_any_time(side) -> None:
    side.link.hears(Type.PING, t=7)
    side.link.hears(Type.PONG, t=7)
    side.session.on_link_event(side.link, None, object())
    assert side.link.sent == [(Type.PONG, {"t": 7})]


async def test_a_report_that_is_refused_ends_the_session(side) -> None:
    joined(side)
    side.handler.fails = True
    side.link.owner = None
    side.session.on_link_event(side.link, None, Message(Type.REPORT, record_of(Type.REPORT)))
    assert isinstance(side.link.error, RefusedError)


async def test_a_second_renewal_waits_for_the_first(side) -> None:
    session = joined(side)
    side.link.hears(Type.ENROL)
    with pytest.raises(RemoteError, match="not answered"):
        side.link.hears(Type.ENROL)
    session.renewed()
    side.link.hears(Type.ENROL)
    assert side.handler.made == ["renew_later"] * 2


async def test_a_peer_that_leaves_says_so(side) -> None:
    joined(side)
    side.link.hears(Type.LEAVE)
    assert side.session.farewell
    assert side.link.closed


async def test_a_silent_peer_is_dropped(side) -> None:
    now = side.session._last_received_at
    side.session.beat(now + 4.0, 5.0)
    assert side.link.kinds() == [Type.PING]
    side.session.on_link_read(side.link, 1)
    side.session.beat(now + 5.5, 5.0)
    side.session.beat(now + 100.0, 5.0)
    assert side.link.aborted
    assert isinstance(side.link.error, RetryableError)


async def test_plans_neighbours_and_ways_are_sent_only_when_new(side) -> None:
    session, place = joined(side), (node("b"), "host", 1)
    for _ in range(2):
        session.send_plan((1, 2), place, [place])
        session.send_neighbours([place])
        session.send_ways([(node("b"), True, [])])
    assert side.link.kinds() == [Type.PLAN, Type.NEIGHBOURS, Type.ADDRESSES]
    assert session.peer.sent_epoch == (1, 2)
    session.send_plan((1, 3), None, [])
    assert side.link.sent == [(Type.PLAN, {"epoch": [1, 3], "parent": None, "host": "", "port": 0, "backups": []})]
    assert session.is_news(1, (place,))
    assert not session.is_news(1, (place,))
    assert session.is_news(2, (place,))


async def test_all_sessions_are_sent_the_same_and_known_by_name(side) -> None:
    sessions = Sessions({"aa": joined(side)})
    sessions.send_all(messages.Hold(Version(0, 1)))
    assert side.link.sent == [(Type.HOLD, {"version": [0, 1]})]
    assert (sessions.name_of("aa"), sessions.name_of("bb")) == ("a", "bb")
