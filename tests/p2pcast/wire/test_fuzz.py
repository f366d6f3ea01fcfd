"""Hostile streams end in an error of ours or in nothing, never in another exception, and memory stays bounded."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from p2pcast import limits
from p2pcast.errors import IntegrityError, RemoteError
from p2pcast.wire.connection import HEADER, Connection
from p2pcast.wire.messages import Type, encode
from p2pcast.wire.state import Side

T = Type
PURPOSES = ("data", "control", "publish", "engine")
CORPUS = [
    (T.PING, {"t": 5}),
    (T.ATTACH, {"live": True, "layouts": [bytes(32)], "want": [[bytes(16), [0, 4, 9, 12]]]}),
    (T.WANT, {"artifact": bytes(16), "have": [1, 2]}),
    (T.ATTACHED, {"path": [bytes(16)], "artifacts": [[bytes(16), "delta", [0, 1], [0, 2], True]]}),
    (T.LAYOUT, {"layout": bytes(32), "document": b"{}" * 40}),
    (T.ALIVE, {"high": [[1, 2]], "stalled": False}),
    (T.GONE, {"artifact": bytes(16)}),
    (T.SPARE, {"artifact": bytes(16)}),
    (T.JOIN, {"name": "n", "region": "r", "listen": ["h", 1], "held": [0, 3], "engine": ["e", "member"]}),
    (T.REPORT, {"parent": None, "staged": [0, 1], "committed": None, "engines": [{"name": "x", "pause_s": 0.5}]}),
    (T.PLAN, {"epoch": [1, 1], "parent": bytes(16), "host": "h", "port": 2, "backups": [[bytes(16), "h", 3]]}),
    (T.CATALOG, {"artifacts": [[bytes(16), "delta", [0, 1], [0, 2], 5, bytes(32), 6, True]], "dropped": []}),
    (T.RANK, {"group": bytes(16), "rank": 1, "ranks": 2}),
    (T.RANKED, {"head": [0, 1], "layout": bytes(32), "state": 7}),
    (T.BEGIN, {"serial": 1, "step": 2, "layout": bytes(32), "resume": False}),
    (T.BEGUN, {"serial": 1, "version": [0, 2], "base": [0, 1]}),
    (
        T.CELL,
        {"serial": 1, "cell": 2, "start": 0, "words": 9, "codec": 3, "before": 4, "after": 5, "changed": 1, "payload": bytes(60)},
    ),
    (T.PASSED, {"serial": 1, "cell": 3}),
    (T.FILE, {"serial": 1, "path": "config.json", "contents": b"{}"}),
    (T.DONE, {"serial": 1, "parts": 1}),
    (T.DURABLE, {"serial": 1, "version": [0, 2], "bytes": 99, "changed": 1, "params": 1000}),
    (T.ABORTED, {"serial": 1, "reason": "why"}),
    (T.LIVE, {"engines": [["a/e", [0, 1], True], ["b/e", None, False]], "head": [0, 2]}),
    (T.ENGINE, {"name": "e", "lead": [bytes(16), "h", 3]}),
    (T.MEMBER, {"engine": "e", "incarnation": bytes(16)}),
    (T.HELD, {"version": [0, 1], "still": True, "round": 1}),
    (T.REPORTED, {"report": bytes(40), "age_us": 2}),
    (T.STILL, {"version": [0, 1], "round": 1}),
    (T.SERVES, {"version": None, "ready": False}),
]


def corpus(wires) -> list[tuple[str, Side, bytes]]:
    """(state it is for, who sends it, bytes)."""
    d, li = wires.pair()
    hello = d.take_output()
    li.feed(hello)
    challenge = li.take_output()
    out = [("new", Side.DIALER, hello), ("new", Side.LISTENER, challenge)]
    for side in Side:
        frames = [HEADER.pack(len(b := encode(k, body)), k, 1, 0) + b for k, body in CORPUS]
        frames += [HEADER.pack(50, T.PIECE, 1, 7) + bytes(50), HEADER.pack(9, T.BATCH, 1, 0) + bytes(9)]
        out += [(purpose, side, f) for purpose in PURPOSES for f in frames]
    return out


def target(wires, state: str, sender: Side) -> Connection:
    d, li = wires.pair() if state == "new" else wires.open(state)
    d.take_output()
    return li if sender is Side.DIALER else d


def mutated(draw: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(out)) if out else 0
        match draw.randrange(6):
            case 0 if out:
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                out[at:at] = draw.randbytes(draw.choice([1, 2, 9]))
            case 2:
                del out[at : at + draw.choice([1, 2, 9])]
            case 3:
                out[at:at] = draw.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x01\x00\x00", b"\xc6\x7f\xff\xff\xff", b"\xc9", b"\xc1", b"\xd6\xff"]
                )
            case 4 if len(out) >= 4:
                out[:4] = draw.choice([len(out) - HEADER.size, draw.randrange(5000), 1 << 31]).to_bytes(4, "little", signed=False) if len(out) >= HEADER.size else b"\0\0\0\0"  # fmt: skip
            case 5:
                out += data
    return bytes(out)


def feed(connection: Connection, data: bytes) -> None:
    try:
        connection.feed(data)
        connection.take_output()
    except (RemoteError, IntegrityError) as error:
        connection.fail(error)
        assert len(connection.take_output()) <= 5000


def test_the_corpus_itself_is_valid_somewhere(wires):
    valid = 0
    for state, sender, data in corpus(wires):
        try:
            target(wires, state, sender).feed(data)
            valid += 1
        except RemoteError:
            pass
    assert valid >= len(CORPUS) + 4


@pytest.mark.parametrize("seed", range(4))
def test_mutations(wires, seed):
    draw = random.Random(seed)
    entries = corpus(wires)
    tracemalloc.start()
    try:
        for _ in range(700):
            state, sender, data = draw.choice(entries)
            feed(target(wires, state, sender), mutated(draw, data))
        assert tracemalloc.get_traced_memory()[1] < 16 * limits.MIB
    finally:
        tracemalloc.stop()


def test_random_bytes(wires):
    draw = random.Random(9)
    for n in range(600):
        state, side = draw.choice(["new", *PURPOSES]), draw.choice(list(Side))
        head = HEADER.pack(draw.randrange(200), draw.choice(list(T)), 1, draw.randrange(9)) if n % 2 else b""
        feed(target(wires, state, side), head + draw.randbytes(draw.randrange(400)))


def test_random_msgpack(wires):
    """Well-formed maps of the wrong things."""
    draw = random.Random(10)

    def value(depth: int):
        return draw.choice(
            [None, True, -5, 1 << 63, "t", b"b" * draw.randrange(40), 0.5, [] if depth > 3 else [value(depth + 1)] * draw.randrange(4), {} if depth > 3 else {"k": value(depth + 1)}]
        )  # fmt: skip

    for _ in range(700):
        kind, body = draw.choice(CORPUS)
        data = encode(kind, body | {draw.choice(sorted(body)): value(0)})
        for state in PURPOSES:
            for side in Side:
                feed(target(wires, state, side), HEADER.pack(len(data), kind, 1, 0) + data)
