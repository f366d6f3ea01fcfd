"""docs/formats/wire-protocol.md: its tables of messages, fields, states and largest bodies agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.constraints import (
    Binary,
    Blob,
    Columns,
    Constraint,
    Flag,
    HostText,
    Integer,
    Nullable,
    OneOf,
    PieceRanges,
    Rows,
    Text,
)
from p2pcast.wire.messages import MAX_BODY, RECORDS, SIGNED, Type

PAGE = (Path(__file__).parents[3] / "docs/formats/wire-protocol.md").read_text()
SIDES = {
    "dialer": Side.DIALER,
    "peer": Side.DIALER,
    "child": Side.DIALER,
    "rank": Side.DIALER,
    "member": Side.DIALER,
    "listener": Side.LISTENER,
    "hub": Side.LISTENER,
    "parent": Side.LISTENER,
    "lead": Side.LISTENER,
}
TOKEN = re.compile(r'[\[\],…≤?:]|"[a-z]+"|[\w^]+…[\w^-]+|\w+')


def rows(heading: str) -> list[list[str]]:
    """The cells of all rows of all tables with these headings."""
    found: list[list[str]] = []
    inside = False
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line == heading:
            inside = True
        elif inside and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert found, heading
    return found


def number(text: str) -> int:
    power, _, minus = text.partition("-")
    base, _, exponent = power.partition("^")
    return int(base) ** int(exponent or 1) - int(minus or 0)


class Notation:
    """A parser of the page's notation of types and fields."""

    def __init__(self, text: str, named: dict[str, Constraint]) -> None:
        self.left = TOKEN.findall(text)
        self.named = named

    def next(self, *expected: str) -> str:
        token = self.left.pop(0)
        assert not expected or token in expected, (token, expected, self.left)
        return token

    def at(self, token: str) -> bool:
        return self.left[:1] == [token]

    def skip(self, token: str) -> bool:
        return self.at(token) and bool(self.left.pop(0))

    def fields(self) -> dict[str, tuple[bool, Constraint]]:
        """Key → whether it is required, and its constraint."""
        found = {}
        while self.left:
            key = self.next()
            required = not self.skip("?")
            self.next(":")
            found[key] = (required, self.type())
            assert not self.left or self.next(",")
        return found

    def type(self) -> Constraint:
        choices: list[Any] = [self.single()]
        while self.skip("or"):
            choices.append(None if self.skip("nil") else self.single())
        if choices[-1] is None:
            return Nullable(*choices[:-1])
        if len(choices) > 1:
            return OneOf(tuple(choices))
        return choices[0]  # type: ignore[no-any-return]

    def single(self) -> Any:
        if self.skip("["):
            return self.array()
        token = self.next()
        if token.startswith('"'):
            return token.strip('"')
        if token.isdigit():
            return int(token)
        if token in ("text", "bin") and self.skip("≤"):
            return (Text if token == "text" else Blob)(number(self.next()))
        if token == "int":
            low, high = self.next().split("…")
            return Integer(number(low), number(high))
        if fixed := re.fullmatch(r"bin(\d+)", token):
            return Binary(int(fixed[1]))
        return self.named[token]

    def array(self) -> Constraint:
        columns = [self.type()]
        while self.skip(","):
            if self.skip("…"):
                self.next("]")
                self.next("≤")
                return Rows(columns[0], number(self.next()))
            columns.append(self.type())
        self.next("]")
        return Columns(tuple(columns))


def plain(constraint: Any) -> Constraint:
    """Without the classes into which values are read."""
    match constraint:
        case Columns():
            return Columns(tuple(map(plain, constraint.of)))
        case Rows():
            return Rows(plain(constraint.of), constraint.most)
        case Nullable():
            return Nullable(plain(constraint.of))
    return constraint  # type: ignore[no-any-return]


def named() -> dict[str, Constraint]:
    found: dict[str, Constraint] = {"bool": Flag(), "host": HostText(), "ranges": PieceRanges()}
    for name, definition, _ in rows("| type | definition | meaning |"):
        if definition.startswith("`"):
            found[name.strip("`")] = Notation(definition.strip("`"), found).type()
    return found


NAMED = named()
MESSAGES = {Type[row[0].strip("`")]: row[1:] for row in rows("| type | no. | from | fields |")}


def test_page_lists_every_message_once_with_its_number() -> None:
    listed = [row[0].strip("`") for row in rows("| type | no. | from | fields |")]
    assert sorted(listed) == sorted(kind.name for kind in Type)
    assert [kind for kind in Type if int(MESSAGES[kind][0]) != kind] == []


@pytest.mark.parametrize("kind", [kind for kind in Type if kind not in (Type.REPORT, Type.PIECE)])
def test_fields_of_a_message_agree_with_its_record(kind: Type) -> None:
    stated = MESSAGES[kind][2]
    if kind in SIGNED:
        assert stated == "signed"
        return
    fields = RECORDS[kind].fields
    expected = {field.key: (field.required, plain(field.constraint)) for field in fields}
    assert Notation(stated.strip("`"), NAMED).fields() == expected


def test_keys_of_a_report_agree_with_its_record() -> None:
    stated, expected = {}, {}
    for key, kind, reading, _ in rows("| key | type | reading | meaning |"):
        key = key.strip("`")
        shape = Notation(kind.strip("`"), NAMED).type() if kind.startswith("`") else None
        stated[key.rstrip("?")] = (not key.endswith("?"), reading == "lenient", shape)
    for field in RECORDS[Type.REPORT].fields:
        known = stated.get(field.key, (False, False, None))[2] is not None
        shape = plain(field.constraint) if known else None
        expected[field.key] = (field.required, field.lenient, shape)
    assert stated == expected
    assert [key for key, value in stated.items() if value[2] is None] == [
        "link", "state", "progress", "engines", "unready", "error",
    ]  # fmt: skip


def test_states_and_senders_agree_with_the_transition_table() -> None:
    stated = {}
    for state, sender, frames in rows("| state | sender | frames |"):
        stated[ConnectionState[state], SIDES[sender]] = set(frames.strip("`").split())
    for (state, side), frames in stated.items():
        allowed = {kind.name for of, by, kind in TRANSITIONS if (of, by) == (state, side) and kind is not Type.ERROR}
        assert frames == allowed, (state, side)
    assert {(state, side) for state, side, kind in TRANSITIONS if kind is Type.PING} == set(stated)


@pytest.mark.parametrize("kind", Type)
def test_sender_of_a_message_agrees_with_the_transition_table(kind: Type) -> None:
    senders = MESSAGES[kind][1]
    stated = set(Side) if senders == "both" else {SIDES[sender] for sender in senders.split(", ")}
    assert {side for _, side, of in TRANSITIONS if of is kind} == stated


def test_largest_bodies_agree_with_the_code() -> None:
    stated: dict[str, int] = {}
    usual = 0
    for size, kinds in rows("| largest body, bytes | types |"):
        if kinds == "all others":
            usual = int(size.replace(" ", ""))
        else:
            stated |= dict.fromkeys(kinds.strip("`").split(), int(size.replace(" ", "")))
    assert {kind.name: stated.get(kind.name, usual) for kind in Type} == {
        kind.name: most for kind, most in MAX_BODY.items()
    }
