"""Fuzz targets of data that comes over sockets: frames in every state of a connection and from either side, and the
install socket's. Texts that a caller of HTTP chooses are targets too.

For each the first byte says where the rest arrives.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

from p2pcast.daemon import http_server, version_waits
from p2pcast.ground.errors import IntegrityError, RemoteError, UsageError
from p2pcast.ground.version import Version
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Connection, ConnectionRequest, Established, Identity, Message, Piece
from p2pcast.wire.connection_state import ConnectionState, Side
from p2pcast.wire.messages import MAX_BODY
from rollout_node.in_engine import install_frames
from tests.fuzz.wire_frames import frames

PURPOSES = ("new", "data", "control", "publish", "engine")
TOKEN = JoinToken(bytes(range(16)), bytes(range(100, 120)))


def _pair(purpose: str) -> tuple[Connection, Connection]:
    """A dialer and a listener; their handshake is over unless they are new."""
    request = ConnectionRequest(purpose if purpose != "new" else "data", "child", bytes(16), stripe=0, stripes=1)
    dialer = Connection(Side.DIALER, Identity(b"d" * 16, "d", TOKEN), b"1" * 32, request)
    listener = Connection(Side.LISTENER, Identity(b"l" * 16, "l", TOKEN), b"2" * 32)
    if purpose != "new":
        while (out := dialer.take_output()) or (back := listener.take_output()):
            listener.feed(out)
            dialer.feed(listener.take_output() if out else back)
    return dialer, listener


@cache
def _hellos() -> list[bytes]:
    """A handshake's frames: HELLO, and what answers it."""
    dialer, listener = _pair("new")
    hello = dialer.take_output()
    listener.feed(hello)
    return [hello, listener.take_output()]


def stream_seeds() -> list[bytes]:
    places = range(2 * len(PURPOSES))
    hello, challenge = _hellos()
    return [
        bytes([0]) + hello,
        bytes([1]) + challenge,
        *(bytes([place]) + frame for place in places for frame in frames()),
    ]


def check_stream(data: bytes) -> None:
    """Accepted messages are within their limits; after a fault no message is accepted, and its error is short."""
    place = data[0] if data else 0
    dialer, listener = _pair(PURPOSES[place // 2 % len(PURPOSES)])
    heard = listener if place % 2 == 0 else dialer
    heard.take_output()
    try:
        for event in heard.feed(data[1:]):
            if isinstance(event, Message):
                assert len(event.signed) <= MAX_BODY[event.type]
            elif isinstance(event, Piece):
                assert heard.state is ConnectionState.DATA
                assert len(event.payload) <= len(data)
            else:
                assert isinstance(event, Established)
    except (RemoteError, IntegrityError) as error:
        heard.fail(error)
    assert len(heard.take_output()) <= 5000


def install_seeds() -> list[bytes]:
    asked: list[dict[str, Any]] = [
        {"op": "layout"},
        {"op": "patches", "from": None, "to": "0.3"},
        {
            "op": "report",
            "engine": "e",
            "rank": 0,
            "phase": "prepare",
            "version": "0.3",
            "nonce": "n",
            "error": None,
            "rows": [[1, 2, 3]],
        },
    ]
    return [install_frames.pack(message, 1 << 20)[install_frames.LENGTH.size :] for message in asked]


def check_install(data: bytes) -> None:
    try:
        message = install_frames.unpack(data)
    except RemoteError:
        return
    assert all(isinstance(key, str) for key in message)


def text_seeds() -> list[bytes]:
    return [
        b"\0" + b"0.12",
        b"\0" + b"4294967295.9223372036854775807",
        b"\x01" + b"17",
        b"\x02" + b"12.5",
        b"\x03" + b"p2pc1-aaaa-bbbb",
    ]


def check_text(data: bytes) -> None:
    """A version, an event's id, a number, a token: an accepted text has a value, any other is refused in a line."""
    kind, text = (data[0] if data else 0) % 4, data[1:].decode("utf-8", "replace")
    said = ""
    request = cast(web.Request, SimpleNamespace(headers={}, query={"since": text, "x": text}))
    try:
        if kind == 0:
            version = Version.parse(text)
            assert Version.parse(str(version)) == version
        elif kind == 1:
            found = http_server._event_id(request)
            assert found is not None
            assert found >= 0
        elif kind == 2:
            number = version_waits._number(request.query, "x", 10.0)
            assert number is not None
            assert 0 <= number <= 10
        else:
            assert str(JoinToken.parse(text)).startswith("p2pc1-")
    except UsageError as error:
        said = str(error)
    assert len(said) < 300
