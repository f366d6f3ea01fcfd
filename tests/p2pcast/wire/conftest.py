"""Two ends of a connection, wired in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Connection, ConnectionRequest, Event, Identity
from p2pcast.wire.connection_state import Side

TOKEN = JoinToken(bytes(range(16)), bytes(range(100, 120)))
DIALER = Identity(b"d" * 16, "peer-1", TOKEN)
LISTENER = Identity(b"l" * 16, "hub", TOKEN)


class Wires:
    token = TOKEN
    dialer = DIALER
    listener = LISTENER

    @staticmethod
    def request(purpose: str = "data", **more: Any) -> ConnectionRequest:
        return replace(ConnectionRequest(purpose, "child", b"k" * 16, stripe=0, stripes=1), **more)

    @classmethod
    def pair(
        cls,
        purpose: str = "data",
        *,
        dialer: Identity = DIALER,
        listener: Identity = LISTENER,
        expect: bytes | None = None,
        **more: Any,
    ) -> tuple[Connection, Connection]:
        d = Connection(Side.DIALER, dialer, b"1" * 32, cls.request(purpose, **more), expect)
        return d, Connection(Side.LISTENER, listener, b"2" * 32)

    @staticmethod
    def shake(d: Connection, li: Connection) -> tuple[list[Event], list[Event]]:
        """Carry bytes to and fro until both sides have none; events of the dialer and of the listener."""
        at_dialer: list[Event] = []
        at_listener: list[Event] = []
        while True:
            out, back = d.take_output(), li.take_output()
            if not out and not back:
                return at_dialer, at_listener
            at_listener += li.feed(out)
            at_dialer += d.feed(back)

    @classmethod
    def open(cls, purpose: str = "data") -> tuple[Connection, Connection]:
        d, li = cls.pair(purpose)
        cls.shake(d, li)
        return d, li


@pytest.fixture(scope="session")
def wires() -> type[Wires]:
    return Wires
