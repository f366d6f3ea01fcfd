"""The wire's own bytes, for good: tests/golden/wire-v2.hex holds a handshake and a piece; a change of any byte is
another protocol version.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pcast.ground.errors import IncompatibleError
from p2pcast.wire.connection import Piece
from p2pcast.wire.connection_state import ConnectionState
from tests.p2pcast.wire.decisions import lines

FOLDER = Path(__file__).parents[2] / "golden"


def golden(protocol: int = 2) -> dict[str, bytes]:
    text = (FOLDER / f"wire-v{protocol}.hex").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {key: bytes.fromhex(value) for key, value in (line.split(": ", 1) for line in lines)}


def test_we_write_these_bytes(wires):
    known = golden()
    d, li = wires.pair("data", stripe=1, stripes=4)
    made = {"hello": d.take_output()}
    li.feed(made["hello"])
    made["challenge"] = li.take_output()
    d.feed(made["challenge"])
    made["proof"] = d.take_output()
    li.feed(made["proof"])
    made["ready"] = li.take_output()
    d.feed(made["ready"])
    made["piece"] = li.piece_header(258, 66051, 5) + b"piece"
    assert {k: v.hex(" ") for k, v in made.items()} == {k: v.hex(" ") for k, v in known.items()}


def test_we_read_these_bytes(wires):
    known = golden()
    d, li = wires.pair("data", stripe=1, stripes=4)
    d.take_output()
    (established,) = li.feed(known["hello"] + known["proof"])
    assert established.hello.stripe == 1
    *_, piece = d.feed(known["challenge"] + known["ready"] + known["piece"])
    assert isinstance(piece, Piece)
    assert (piece.handle, piece.index, bytes(piece.payload)) == (258, 66051, b"piece")
    assert d.state is li.state is ConnectionState.DATA


def test_a_hello_of_protocol_1_is_refused_and_says_which_side_to_update(wires):
    _, li = wires.pair("data")
    with pytest.raises(
        IncompatibleError, match=r"speaks protocol 2, the dialing node protocol 1: update p2pcast on the dialing node"
    ):
        li.feed(golden(1)["hello"])


def test_bodies_are_taken_and_refused_as_ever():
    """A field that is added adds lines; a line that changes is another protocol."""
    assert lines() == (FOLDER / "wire-decisions.txt").read_text().splitlines()
