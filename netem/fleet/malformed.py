"""Frames that no honest node sends: a sample of each message, and mutations of them.

The tests of the state machine and the siege of real daemons (`netem.chaos.siege`) use them: such frames must cause
nothing but an error.
"""

from __future__ import annotations

import random
from typing import Any

from p2pcast.wire.connection import HEADER
from p2pcast.wire.messages import Type, encode_map

T = Type
SAMPLES: list[tuple[Type, dict[str, Any]]] = [
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
        {
            "serial": 1,
            "cell": 2,
            "start": 0,
            "words": 9,
            "codec": 3,
            "before": 4,
            "after": 5,
            "changed": 1,
            "payload": bytes(60),
        },
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
"""Well-formed, each with a body that its type allows."""


def frames() -> list[bytes]:
    """The samples as frames, followed by a piece and a signed record."""
    found = [HEADER.pack(len(body), kind, 1, 0) + body for kind, body in ((k, encode_map(b)) for k, b in SAMPLES)]
    return [*found, HEADER.pack(50, T.PIECE, 1, 7) + bytes(50), HEADER.pack(9, T.BATCH, 1, 0) + bytes(9)]


def mutated(draw: random.Random, data: bytes) -> bytes:
    """``data`` with one to five changes: flipped bits, more or fewer bytes, msgpack headers that promise too much, a
    wrong length, or a repetition.
    """
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
                    [
                        b"\xdd\xff\xff\xff\xff",
                        b"\xdf\x00\x01\x00\x00",
                        b"\xc6\x7f\xff\xff\xff",
                        b"\xc9",
                        b"\xc1",
                        b"\xd6\xff",
                    ]
                )
            case 4 if len(out) >= 4:
                out[:4] = (
                    draw.choice([len(out) - HEADER.size, draw.randrange(5000), 1 << 31]).to_bytes(
                        4, "little", signed=False
                    )
                    if len(out) >= HEADER.size
                    else b"\0\0\0\0"
                )
            case 5:
                out += data
    return bytes(out)
