"""Which bodies a release accepts: tests/golden/wire-decisions.txt has a line for each field and each value inside it,
with the decision on each probe, in order. ``20-`` stands for 20 refused probes, ``+`` for accepted, ``~`` for accepted
with a lenient value dropped. ``python -m tests.p2pcast.wire.decisions`` prints the file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import msgpack

from p2pcast.ground.errors import RemoteError
from p2pcast.wire.messages import RECORDS, Type
from p2pcast.wire.records import read, unpacked
from tests.p2pcast.wire.test_connection_state import BODIES
from tests.p2pcast.wire.test_lenient_report import MAY

Decide = Callable[[Type, bytes], str]
Path = tuple[str | int, ...]

SAMPLES = BODIES | {
    Type.HELLO: {
        "v": 2,
        "run": bytes(16),
        "node": bytes(16),
        "name": "n",
        "nonce": bytes(32),
        "token": bytes(8),
        "purpose": "data",
        "role": "child",
        "link": bytes(16),
        "stripe": 0,
        "stripes": 1,
        "least": 2,
        "greatest": 2,
    },
    Type.CHALLENGE: {
        "v": 2,
        "run": bytes(16),
        "node": bytes(16),
        "nonce": bytes(32),
        "proof": bytes(32),
        "authority": b"a",
    },
    Type.PROOF: {"proof": bytes(32)},
    Type.READY: {"v": 2},
    Type.ERROR: {"code": "refused", "message": "why"},
}
LATER = {
    Type.BEGUN: {"codec": "raw"},
    Type.ATTACH: {"spare": [bytes(16)], "reserve": True},
    Type.JOIN: {"ways": [["h", 1]], "families": [4, 6]},
    Type.WELCOME: {"bearer": "b", "name": "n"},
    Type.EVICTED: {"signed": [bytes(97)]},
    Type.ENGINE: {"members": [bytes(16)]},
    Type.REPORT: MAY
    | {
        "evicted": [bytes(97)],
        "durable": [b"d"],
        "opened": [b"o"],
        "held": [bytes(16)],
        "dropped": [bytes(16)],
        "garbled": [[bytes(16), 1]],
        "lacking": [[bytes(16), None]],
        "spoilt": ["s"],
    },
}

INTEGERS = [-1, 0, 1, 2, 4, 5, 6, 7, 8, 9, 63, 64, 65, 255, 256]
INTEGERS += [(1 << power) + more for power in (16, 30, 31, 32, 40, 44, 45, 50, 53, 62, 63) for more in (-1, 0, 1)]
INTEGERS += [(1 << 64) - 1, -(1 << 63)]
LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 96, 97, 98, 128, 129, 160, 161, 253, 254, 255, 256, 257, 1024, 1025]
LENGTHS += [4096, 4097]
COUNTS = [
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    9,
    16,
    17,
    32,
    33,
    64,
    65,
    128,
    129,
    256,
    257,
    512,
    513,
    1024,
    1025,
    2048,
    2049,
    4096,
    4097,
]
PROBES: list[Any] = [
    None,
    True,
    False,
    0.5,
    1.0,
    float("nan"),
    float("inf"),
    *INTEGERS,
    *("x" * length for length in LENGTHS),
    *(bytes(length) for length in LENGTHS),
    "",
    "::1",
    "::1%eth0",
    "a b",
    "h.example",
    "0.1",
    "4294967296.1",
    "newest",
    "auto",
    "anchor",
    "lead",
    "parent",
    [],
    [0],
    [0, 1],
    [0, 1, 1, 2],
    [0, 1, 2, 3],
    [3, 2],
    [True, 2],
    [-1, 2],
    [0, (1 << 30) + 1],
    [None, None],
    [[]],
    [0, 0, 0],
    {},
    {"a": 1},
]


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Paths of ``value`` and of all values inside it."""
    yield here
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from paths(each, (*here, key))


def put(body: dict[str, Any], path: Path, value: Any) -> bytes:
    found: Any = copy.deepcopy(body)
    whole = found
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    packed: bytes = msgpack.packb(whole)
    return packed


def runs(decided: str) -> str:
    return " ".join(f"{len(list(same))}{letter}" for letter, same in groupby(decided))


def line(kind: Type, body: dict[str, Any], path: Path, decide: Decide) -> str:
    found = runs("".join(decide(kind, put(body, path, probe)) for probe in PROBES))
    value: Any = body
    for key in path:
        value = value[key]
    if isinstance(value, list) and value:
        found += " repeated: " + runs("".join(decide(kind, put(body, path, value[:1] * count)) for count in COUNTS))
    return f"{kind.name} {'.'.join(map(str, path))}: {found}"


def decided(kind: Type, data: bytes) -> str:
    """By this release."""
    try:
        _, dropped = read(kind, unpacked(kind, data))
    except RemoteError:
        return "-"
    return "~" if dropped else "+"


def lines(decide: Decide = decided) -> list[str]:
    out = []
    for kind in sorted(RECORDS):
        body = SAMPLES[kind] | LATER.get(kind, {})
        bare = "".join(decide(kind, msgpack.packb({k: v for k, v in body.items() if k != key})) for key in body)
        out.append(f"{kind.name}: {decide(kind, msgpack.packb(body))} without {' '.join(body)}: {bare}")
        out += [line(kind, body, path, decide) for path in paths(body) if path]
    return out


if __name__ == "__main__":
    print("\n".join(lines()))
