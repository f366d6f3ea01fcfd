"""Bodies of messages, made from the constraints of their fields: valid values without sense; now and then an invalid
value, too.

A message that is added to ``p2pcast.wire.messages`` is tried here without further code. For a constraint that is not
known here a valid value is found by trying.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgpack

from p2pcast.ground import limits
from p2pcast.wire.constraints import (
    VERSION,
    Binary,
    Blob,
    Columns,
    Constraint,
    HostText,
    Integer,
    InvalidError,
    Nullable,
    OneOf,
    PieceRanges,
    Rows,
    Text,
)
from p2pcast.wire.messages import MAX_BODY, RECORDS, Record, Type

WRONG_FORM: Final = 0.02
"""Share of bodies with a value that the schema does not allow, one missing, or one too many."""
LONG: Final = 0.02
"""Share of rows that are long."""
MOST_ROWS: Final = 3000
KEPT: Final = 256
"""Of what was learnt, of each kind."""
TEXTS: Final = [
    "",
    "a",
    "hub",
    "p1",
    "0.1",
    "7",
    "9999999999.9",
    "../../etc/passwd",
    "/dev/shm",
    "[/red]",
    "\x1b[2J",
    "a\nb",
    "\0",
    "%s%n",
    "x" * 60,
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}",
    "model.safetensors",
    "config.json",
    "tokenizer/../x",
    "vllm:http://h:1",
]
HOSTS: Final = [
    "",
    "127.0.0.1",
    "127.0.0.9",
    "::1",
    "fe80::1",
    "0.0.0.0",
    "255.255.255.255",
    "no.such.name.invalid",
    "localhost",
    "a" * 63,
]
PORTS: Final = [0, 1, 9, 65535]
ODD: Final[list[Any]] = [
    4,
    6,
    None,
    True,
    False,
    0,
    -1,
    1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    b"",
    b"x" * 16,
    b"x" * 32,
    [],
    [0],
    [1, 0],
    [[]],
    {},
    {"a": 1},
    [None] * 9,
    "::1%" + "a" * 100,
    ["::1%" + "a" * 100, 7000],
    "a" * 300,
    [0, 1, 2],
    "0.1",
    [1 << 62, 1],
    ["127.0.0.1", 1],
    [{"name": "e"}],
]


class World:
    """An insider's knowledge of the run: existing ids and versions."""

    def __init__(self) -> None:
        self.binary: dict[int, dict[bytes, None]] = {}
        """Size → values of it."""
        self.versions: dict[tuple[int, int], None] = {}
        self.signed: dict[Type, list[bytes]] = {}
        self.pieces: list[bytes] = []
        self.documents: list[bytes] = []
        """Of layouts."""
        self.places: list[list[Any]] = [["127.0.0.1", 9]]
        """An address at which a node may listen."""

    def learn(self, found: Any) -> None:
        """Collect the values in a received body."""
        if type(found) is bytes and len(found) in (16, 32):
            known = self.binary.setdefault(len(found), {})
            known[found] = None
            if len(known) > KEPT:
                del known[next(iter(known))]
        elif isinstance(found, list | tuple) and len(found) == 2 and all(type(x) is int for x in found):
            self.versions[found[0], found[1]] = None
            if len(self.versions) > KEPT:
                del self.versions[next(iter(self.versions))]
        elif isinstance(found, Record):
            self.learn([getattr(found, field.key) for field in found.fields])
        elif isinstance(found, list | tuple | dict):
            for each in found.values() if isinstance(found, dict) else found:
                self.learn(each)


def is_valid(constraint: Constraint, value: Any) -> bool:
    """``value`` as a caller writes it, with lists."""
    try:
        constraint.reader()(_as_tuples(value))
    except InvalidError:
        return False
    return True


def _as_tuples(value: Any) -> Any:
    if type(value) is dict:
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(map(_as_tuples, value)) if type(value) is list else value


class Nonsense:
    """``draw``: everything comes from it, so a seed repeats a run as far as daemons allow."""

    def __init__(self, draw: random.Random, world: World) -> None:
        self.draw = draw
        self.world = world

    def body(self, kind: Type, *, right: bool = False) -> dict[str, Any]:
        """Of a message that is not signed, and not a piece. ``right``: in form, for certain."""
        draw = self.draw
        body: dict[str, Any] = {}
        for field in RECORDS[kind].fields:
            if field.lenient and draw.random() < 0.5:
                tries = [self._said_of(kind, field.key), draw.choice(ODD), draw.choice(ODD)]
                body[field.key] = next(
                    (each for each in tries if each is not None and is_valid(field.constraint, each)), tries[1]
                )
            elif field.required or (not field.lenient and draw.random() < 0.5):
                body[field.key] = self.value(field.constraint)
        if not right and draw.random() < WRONG_FORM:
            self._spoil(body)
        return body

    def encoded(self, kind: Type) -> bytes:
        """As it goes into a frame; within what its type may have, nearly always."""
        for _ in range(5):
            data: bytes = msgpack.packb(self.body(kind))
            if len(data) <= MAX_BODY[kind]:
                return data
        return b"\x80"

    def value(self, constraint: Constraint) -> Any:
        """A valid one."""
        places = self.world.places
        match constraint:
            case Integer(0, 65535):
                return self.draw.choice([*PORTS, *(port for _, port in places)])
            case Integer(low, high):
                return self._integer(low, high)
            case Binary(size):
                return self._binary(size)
            case Blob(most):
                return self._blob(most)
            case Text(most):
                return self._text(most)
            case OneOf(values):
                return self.draw.choice(values)
            case HostText():
                return self.draw.choice(HOSTS)
            case PieceRanges():
                return self._ranges()
            case Nullable(of):
                return None if self.draw.random() < 0.3 else self.value(of)
            case Rows(of, most):
                return self._row(of, most)
            case Columns() if constraint == VERSION:
                return self._version()
            case Columns((HostText(), _)) if self.draw.random() < 0.5:
                return list(self.draw.choice(places))
            case Columns(columns):
                return [self.value(each) for each in columns]
        return next((odd for odd in self.draw.sample(ODD, len(ODD)) if is_valid(constraint, odd)), None)

    def signed(self, kind: Type) -> bytes:
        """A signed record that was received, unchanged or spoilt; or empty bytes."""
        known = self.world.signed.get(kind) or [b""]
        return self._perhaps_spoilt(self.draw.choice(known))

    def piece(self) -> bytes:
        return self._perhaps_spoilt(self.draw.choice(self.world.pieces or [b"x" * 900])) or b"x"

    def _perhaps_spoilt(self, data: bytes) -> bytes:
        if self.draw.random() < 0.6 and data:
            return data
        out = bytearray(data or self.draw.randbytes(self.draw.choice([1, 40, 400])))
        out[self.draw.randrange(len(out))] ^= 1 << self.draw.randrange(8)
        return bytes(out)

    # -- of each kind

    def _integer(self, low: int, high: int) -> int:
        near = [
            low,
            high,
            low + 1,
            high - 1,
            self.draw.randint(low, high),
            self.draw.randint(0, 9),
            1 << self.draw.randrange(63),
        ]
        known = [part for version in self.world.versions for part in version]
        fit: list[int] = [n for n in [*near, *known[-4:]] if low <= n <= high]
        return self.draw.choice(fit)

    def _binary(self, size: int) -> bytes:
        known = list(self.world.binary.get(size, ()))
        if known and self.draw.random() < 0.8:
            return self.draw.choice(known)
        return self.draw.choice([bytes(size), b"\xff" * size, self.draw.randbytes(size)])

    def _blob(self, most: int) -> bytes:
        size = min(most, self.draw.choice([0, 1, 40, 400, 4096]))
        tries: list[bytes] = [
            self.draw.randbytes(size),
            msgpack.packb(self.draw.choice(ODD)),
            *self.world.documents[-1:],
        ]
        return self.draw.choice(tries)[:most]

    def _text(self, most: int) -> str:
        return self.draw.choice([*TEXTS, "y" * most])[:most]

    def _version(self) -> list[int]:
        if self.world.versions and self.draw.random() < 0.6:
            branch, step = self.draw.choice(list(self.world.versions))
            if branch <= limits.MAX_BRANCH and step <= limits.MAX_STEP:
                return [branch, step]
        return [self.draw.choice([0, 1, limits.MAX_BRANCH]), self.draw.choice([0, 1, 7, limits.MAX_STEP])]

    def _row(self, of: Constraint, most: int) -> list[Any]:
        size = self.draw.choice([0, 1, 1, 2, 3])
        if self.draw.random() < LONG:
            size = self.draw.choice([17, 300, MOST_ROWS])
        one = self.value(of)
        # Rows of one kind of value thousands of times: the same one each time is as long.
        return [one if n > 20 else self.value(of) for n in range(min(size, most))]

    def _ranges(self) -> list[int]:
        draw = self.draw
        if draw.random() < 0.1:
            return [0, limits.MAX_PIECES]
        return sorted(
            draw.sample(range(draw.choice([30, 10_000, limits.MAX_PIECES])), 2 * draw.choice([0, 0, 1, 1, 2, 8]))
        )

    def _said_of(self, kind: Type, key: str) -> Any:
        """An honest node's value of an optional key of its report."""
        row = {
            "name": self._text(160) or "e",
            "ready": True,
            "started": True,
            "staged": "0.1",
            "committed": "0.1",
            "pause_s": 0.1,
        }
        said: dict[str, Any] = {
            "epoch": [self._integer(0, 1 << 62), 1],
            "transfer": [
                self._integer(0, limits.MAX_STATE_BYTES),
                self._integer(1, 1 << 53),
            ],
            "inflow": [self._integer(0, 1 << 62), self._integer(1, 1 << 53), 5],
            "engines": [
                row | {self.draw.choice(list(row)): self.draw.choice(ODD)} for _ in range(self.draw.choice([1, 2, 70]))
            ],
            "http": [self.draw.choice(HOSTS), 80],
            "link": {"dialled_by": self.draw.choice(["parent", "child", "x"]), "address": "h:1"},
            "progress": {"version": "0.1", "pieces": 1, "of": self.draw.choice([2, 0, -1])},
        }
        return said.get(key, self.draw.choice(["idle", 1, 1 << 61]))

    def _spoil(self, body: dict[str, Any]) -> None:
        key = self.draw.choice([*body, "another"])
        if self.draw.random() < 0.3:
            body.pop(key, None)
        else:
            body[key] = self.draw.choice(ODD)
