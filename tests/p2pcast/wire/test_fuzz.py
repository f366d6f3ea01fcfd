"""Hostile streams end in an error of ours or in nothing, never in another exception, and memory stays bounded."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, RemoteError
from p2pcast.wire.connection import HEADER, Connection
from p2pcast.wire.connection_state import Side
from p2pcast.wire.messages import Type, encode_map
from tests.fuzz.mutate import mutated
from tests.fuzz.wire_frames import frames, samples

T = Type
PURPOSES = ("data", "control", "publish", "engine")


def corpus(wires) -> list[tuple[str, Side, bytes]]:
    """(state it is for, side that sends it, bytes)."""
    d, li = wires.pair()
    hello = d.take_output()
    li.feed(hello)
    challenge = li.take_output()
    out = [("new", Side.DIALER, hello), ("new", Side.LISTENER, challenge)]
    out += [(purpose, side, frame) for side in Side for purpose in PURPOSES for frame in frames()]
    return out


def target(wires, state: str, sender: Side) -> Connection:
    d, li = wires.pair() if state == "new" else wires.open(state)
    d.take_output()
    return li if sender is Side.DIALER else d


def feed(connection: Connection, data: bytes) -> None:
    try:
        connection.feed(data)
        connection.take_output()
        # Buffer space is made for the length that the last header has promised.
        connection.get_buffer()
    except (RemoteError, IntegrityError) as error:
        connection.fail(error)
        assert len(connection.take_output()) <= 5000


def test_every_corpus_entry_is_valid_in_some_state(wires):
    valid = 0
    for state, sender, data in corpus(wires):
        try:
            target(wires, state, sender).feed(data)
            valid += 1
        except RemoteError:
            pass
    assert valid >= len(samples()) + 4


@pytest.mark.parametrize("seed", range(4))
def test_mutations(wires, seed):
    draw = random.Random(seed)
    entries, others = corpus(wires), frames()
    tracemalloc.start()
    try:
        for _ in range(700):
            state, sender, data = draw.choice(entries)
            feed(target(wires, state, sender), mutated(data, others, draw))
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
    draw, bodies = random.Random(10), [sample for sample in samples() if sample[1]]

    def value(depth: int):
        return draw.choice(
            [
                None,
                True,
                -5,
                1 << 63,
                "t",
                b"b" * draw.randrange(40),
                0.5,
                [] if depth > 3 else [value(depth + 1)] * draw.randrange(4),
                {} if depth > 3 else {"k": value(depth + 1)},
            ]
        )

    for _ in range(700):
        kind, body = draw.choice(bodies)
        data = encode_map(body | {draw.choice(sorted(body)): value(0)})
        for state in PURPOSES:
            for side in Side:
                feed(target(wires, state, side), HEADER.pack(len(data), kind, 1, 0) + data)
