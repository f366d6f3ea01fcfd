"""The transition table, restated by hand from docs/formats/wire-protocol.md, section 3: a message that is not in it is
refused, on receiving and on sending.
"""

from __future__ import annotations

import msgpack
import pytest

from p2pcast.ground.errors import RemoteError
from p2pcast.wire.connection import HEADER, Connection, Message, Piece
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.messages import MAX_BODY, NO_BODY, RECORDS, SIGNED, Ping, Type
from tests.p2pcast.wire.plain_records import as_tuples, plain

D, L = Side.DIALER, Side.LISTENER
T = Type
_NAMES = {
    (ConnectionState.HELLO, D): "HELLO",
    (ConnectionState.CHALLENGE, L): "CHALLENGE READY",
    (ConnectionState.PROOF, D): "PROOF",
    (ConnectionState.READY, L): "READY",
    (ConnectionState.CONTROL, D): "JOIN REPORT LEAVE CALL UNREACHABLE ENROL FIND_SOURCES SQUASH PING PONG",
    (
        ConnectionState.CONTROL,
        L,
    ): "WELCOME PLAN NEIGHBOURS ADDRESSES CALLED UNREACHABLE SOURCES CATALOG COMMIT HOLD"
    " ENGINE ISSUED EVICTED SQUASHING PING PONG",
    (ConnectionState.DATA, D): "ATTACH WANT SKIP REQUEST CANCEL SET_RATE PING PONG",
    (
        ConnectionState.DATA,
        L,
    ): "ATTACHED PATH LAYOUT OPEN BATCH PIECE SEAL CONFIRM ABORT GONE HAVE CANCELLED ALIVE PING PONG",
    (ConnectionState.PUBLISH, D): "RANK LAYOUT BEGIN CELL PASSED FILE DONE ABORTED LEAVE PING PONG",
    (ConnectionState.PUBLISH, L): "RANKED LAYOUT BEGUN DURABLE ABORTED LIVE PING PONG",
    (ConnectionState.ENGINE, D): "MEMBER HELD WORKER_REPORT PING PONG",
    (ConnectionState.ENROL, D): "ENROL PING PONG",
    (ConnectionState.ENROL, L): "ISSUED PING PONG",
    (ConnectionState.ENGINE, L): "FREEZE SERVING PING PONG",
}
ALLOWED = {key: {Type[name] for name in names.split()} for key, names in _NAMES.items()}
EVERY = [(state, side, kind) for state in ConnectionState for side in Side for kind in Type]
BAD = [
    row
    for row in EVERY
    if row[2] not in ALLOWED.get(row[:2], set()) and not (row[2] is T.ERROR and row[0] is not ConnectionState.CLOSED)
]

V = [1, 2]
BODIES = {
    T.PING: {"t": 1},
    T.PONG: {"t": 1},
    T.JOIN: {"name": "p", "region": "", "listen": ["", 1], "held": None, "engine": ["big", "lead"]},
    T.REPORT: {"parent": None, "staged": None, "committed": V},
    T.LEAVE: {},
    T.ENROL: {"request": b"r"},
    T.ISSUED: {"certificate": b"c"},
    T.EVICTED: {"nodes": [bytes(16)]},
    T.WELCOME: {"key": bytes(32), "epoch": [1, 1], "commit": "auto", "target": None, "host": "h"},
    T.PLAN: {"epoch": [1, 2], "parent": None, "host": "", "port": 0, "backups": [[bytes(16), "h", 1]]},
    T.CATALOG: {
        "artifacts": [[bytes(16), "delta", V, V, 9, bytes(32), 1 << 63, True, bytes(32), b""]],
        "dropped": [bytes(16)],
    },
    T.COMMIT: {"version": V},
    T.HOLD: {"version": V},
    T.NEIGHBOURS: {"peers": []},
    T.ADDRESSES: {"peers": [[bytes(16), True, [["h", 1], ["::1", 2]]]]},
    T.CALL: {"node": bytes(16), "stripes": 4},
    T.CALLED: {"node": bytes(16), "stripes": 4, "ways": [["h", 1]]},
    T.UNREACHABLE: {"node": bytes(16)},
    T.SQUASH: {"base": V},
    T.SQUASHING: {"base": V, "version": None, "bytes": 0, "wait_us": 0},
    T.ATTACH: {"live": True, "layouts": [bytes(32)], "want": [[bytes(16), [0, 3, 5, 6]]]},
    T.WANT: {"artifact": bytes(16), "have": []},
    T.ATTACHED: {"path": [bytes(16)], "artifacts": [[bytes(16), "anchor", None, V, False]]},
    T.PATH: {"path": []},
    T.LAYOUT: {"layout": bytes(32), "document": b"{}"},
    T.ABORT: {},
    T.GONE: {"artifact": bytes(16)},
    T.SKIP: {"artifact": bytes(16)},
    T.ALIVE: {"high": [[1, 70000]]},
    T.REQUEST: {"artifact": bytes(16), "pieces": [0, 3, 5, 6], "seal": True},
    T.HAVE: {"artifact": bytes(16), "pieces": [0, 3], "sealed": False},
    T.CANCEL: {"artifact": bytes(16), "pieces": [1, 2]},
    T.CANCELLED: {"artifact": bytes(16), "pieces": []},
    T.SET_RATE: {"bytes_s": None},
    T.FIND_SOURCES: {"artifact": bytes(16), "without": [bytes(16)]},
    T.SOURCES: {"artifact": bytes(16), "peers": [[bytes(16), "h", 1]]},
    T.RANK: {"group": bytes(16), "rank": 3, "ranks": 4},
    T.RANKED: {"head": V, "layout": bytes(32), "state": 1 << 63},
    T.BEGIN: {"serial": 0, "step": 7, "layout": bytes(32), "resume": False},
    T.BEGUN: {"serial": 0, "version": V, "base": None},
    T.CELL: {
        "serial": 0,
        "cell": 5,
        "start": 0,
        "words": 9,
        "codec": 3,
        "before": 1 << 63,
        "after": 2,
        "changed": 1,
        "payload": b"p",
    },
    T.PASSED: {"serial": 0, "cell": 6},
    T.FILE: {"serial": 0, "path": "config.json", "contents": b"{}"},
    T.DONE: {"serial": 0, "parts": 1},
    T.DURABLE: {"serial": 0, "version": V, "bytes": 9, "changed": 1, "params": 100},
    T.ABORTED: {"serial": 0, "reason": "rank 2 of 4 is gone"},
    T.LIVE: {"engines": [["a/vllm", V, True], ["b/vllm", None, False]], "head": V},
    T.ENGINE: {"name": "big", "lead": [bytes(16), "h", 1]},
    T.MEMBER: {"engine": "big", "incarnation": bytes(16)},
    T.HELD: {"version": V, "still": True, "round": 1},
    T.WORKER_REPORT: {"report": b"r", "age_us": 1},
    T.FREEZE: {"version": None, "round": 2},
    T.SERVING: {"version": V, "ready": True},
}


def at(wires, state: ConnectionState, side: Side) -> Connection:
    """A connection in a state; the path there is not what is tested here."""
    d, li = wires.pair()
    connection = d if side is D else li
    d.take_output()
    connection.state = state
    connection._handshake.hello = wires.pair()[0]._handshake.hello
    return connection


def frame(kind: Type) -> bytes:
    body = b"x" if kind in SIGNED or kind is T.PIECE else msgpack.packb(BODIES.get(kind, {}))
    return HEADER.pack(len(body), kind, 1, 0) + body


def test_the_table_is_the_documents():
    table = {
        (state, side): {t for s, d, t in TRANSITIONS if (s, d) == (state, side)}
        for state in ConnectionState
        for side in Side
    }
    for key, kinds in table.items():
        assert kinds - {T.ERROR} == ALLOWED.get(key, set())
        assert (T.ERROR in kinds) == (key[0] is not ConnectionState.CLOSED)
    assert all(new is ConnectionState.CLOSED for (_, _, kind), new in TRANSITIONS.items() if kind is T.ERROR)
    assert set(RECORDS) | SIGNED | {T.PIECE} == set(Type) == set(MAX_BODY)


@pytest.mark.parametrize("state", ConnectionState)
@pytest.mark.parametrize("side", Side)
def test_messages_outside_the_table_are_refused_on_receive(wires, state, side):
    for kind in (k for s, d, k in BAD if (s, d) == (state, side)):
        connection = at(wires, state, side.other)
        with pytest.raises(RemoteError, match=f"{kind.name} from the {side.value} is not for a connection that is"):
            connection.feed(frame(kind)[: HEADER.size])


@pytest.mark.parametrize("state", ConnectionState)
@pytest.mark.parametrize("side", Side)
def test_messages_outside_the_table_are_refused_on_send(wires, state, side):
    for kind in (k for s, d, k in BAD if (s, d) == (state, side)):
        connection = at(wires, state, side)
        if kind is T.PIECE:
            if state is ConnectionState.DATA:
                continue  # the hot path checks the state alone: only the relay sends pieces
            with pytest.raises(RemoteError):
                connection.piece_header(1, 0, 1)
        with pytest.raises(RemoteError):
            connection.send_signed(kind, b"x", 1)
        assert connection.state is state
        assert connection.take_output() == b""


@pytest.mark.parametrize(
    ("purpose", "side", "kind"),
    [
        (purpose, side, kind)
        for purpose, state in (
            ("control", ConnectionState.CONTROL),
            ("data", ConnectionState.DATA),
            ("publish", ConnectionState.PUBLISH),
            ("engine", ConnectionState.ENGINE),
        )
        for side in Side
        for kind in sorted(ALLOWED[state, side])
    ],
)
def test_messages_in_the_table_arrive(wires, purpose, side, kind):
    d, li = wires.open(purpose)
    sender, receiver = (d, li) if side is D else (li, d)
    before = sender.state
    if kind is T.PIECE:
        (event,) = receiver.feed(sender.piece_header(7, 9, 3) + b"abc")
        assert isinstance(event, Piece)
        assert (event.handle, event.index, bytes(event.payload)) == (7, 9, b"abc")
    elif kind in SIGNED:
        (event,) = receiver.feed(sender.send_signed(kind, b"record", 65535))
        assert event == Message(kind, NO_BODY, 65535, b"record")
    else:
        record = RECORDS[kind](**as_tuples(BODIES[kind]))
        (event,) = receiver.feed(sender.send(record, handle=3))
        assert isinstance(event, Message)
        assert (event.type, event.handle, plain(event.body)) == (kind, 3, BODIES[kind])
    assert sender.state is receiver.state is before


def test_an_error_closes(wires):
    for purpose in ("control", "data", "publish", "engine"):
        d, li = wires.open(purpose)
        li.fail(RemoteError("why"))
        with pytest.raises(RemoteError, match="why"):
            d.feed(li.take_output())
        assert d.state is li.state is ConnectionState.CLOSED
        with pytest.raises(RemoteError):
            d.send(Ping(1))
        with pytest.raises(RemoteError):
            li.feed(frame(T.PING))
