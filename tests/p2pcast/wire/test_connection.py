"""Frames: however the bytes are cut, the same events come out; no length is believed before it is checked."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire.connection import HEADER, SCRATCH_BYTES, Connection, Message, Piece
from p2pcast.wire.messages import (
    MAX_BODY,
    Abort,
    Alive,
    Cell,
    Durable,
    Layout,
    Passed,
    Type,
)

T = Type
HALF = SCRATCH_BYTES // 2


def seen(events):
    return [
        (e.handle, e.index, bytes(e.payload)) if isinstance(e, Piece) else (e.type, e.handle, e.signed or e.body)
        for e in events
    ]


def drip(connection: Connection, data: bytes, cuts: list[int]):
    """Feed ``data`` as a socket would: into the buffer that the connection gives, never more than it holds."""
    events, at, turn = [], 0, 0
    while at < len(data):
        buffer = connection.get_buffer()
        assert len(buffer) > 0
        take = min(len(buffer), len(data) - at, cuts[turn % len(cuts)])
        turn += 1
        buffer[:take] = data[at : at + take]
        at += take
        events += connection.received(take)
    return events


def stream(sender: Connection, sizes: list[tuple[str, int]], seed: int) -> bytes:
    draw = random.Random(seed)
    out = b""
    for n, (what, size) in enumerate(sizes):
        if what == "piece":
            out += sender.piece_header(n % 65536, n, max(1, size)) + draw.randbytes(max(1, size))
        elif what == "signed":
            out += sender.send_signed(T.BATCH, draw.randbytes(size), n % 65536)
        elif what == "layout":
            out += sender.send(Layout(bytes(32), draw.randbytes(size)))
        else:
            out += sender.send(Alive([(1, size)]))
    return out


def cell(payload: bytes) -> Cell:
    return Cell(1, cell=2, start=3, words=4, codec=1, before=None, after=5, changed=4, payload=payload)


EDGES = [1, 2, HALF - 13, HALF - 12, HALF - 11, HALF, SCRATCH_BYTES - 13, SCRATCH_BYTES - 12, SCRATCH_BYTES, limits.MIB]
SIZES = st.sampled_from(EDGES) | st.integers(1, 300) | st.integers(1, 1 << 17)
ROWS = st.lists(
    st.tuples(st.sampled_from(["piece", "piece", "signed", "layout", "alive"]), SIZES), min_size=1, max_size=8
)


def capped(rows):
    return [(w, min(s, limits.MAX_SIGNED_BYTES) if w == "signed" else s) for w, s in rows]


@settings(max_examples=60, deadline=None)
@given(
    ROWS.map(capped),
    st.lists(st.integers(1, 200) | st.integers(1, 100_000), min_size=1, max_size=6),
    st.integers(0, 99),
)
@example([("piece", limits.MIB), ("alive", 1), ("piece", 1)], [HALF, 1], 1)
def test_any_cuts_make_the_same_events(wires, rows, cuts, seed):
    d, li = wires.open()
    data = stream(li, rows, seed)
    whole = seen(d.feed(data))
    assert len(whole) == len(rows)
    assert d.payload_bytes == sum(size for what, size in rows if what == "piece")
    d2, _ = wires.open()
    assert seen(drip(d2, data, cuts)) == whole


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["piece", "signed", "alive"]), st.integers(1, 3000)), min_size=1, max_size=6))
def test_byte_by_byte(wires, rows):
    d, li = wires.open()
    data = stream(li, rows, 5)
    d2, _ = wires.open()
    assert seen(drip(d2, data, [1])) == seen(d.feed(data))


def test_pieces_of_every_kind_of_size_between_others(wires):
    sizes = [2**k + e for k in range(21) for e in (-1, 0, 1) if 1 <= 2**k + e <= limits.MIB]
    rows = [row for size in sizes for row in (("piece", size), ("alive", size))]
    d, li = wires.open()
    data = stream(li, rows, 3)
    got = drip(d, data, [65536, 1, 4096, 77777])
    pieces = [e for e in got if isinstance(e, Piece)]
    assert [len(p.payload) for p in pieces] == sizes
    assert d.payload_bytes == sum(sizes)
    bodies: list[Any] = [e.body for e in got if isinstance(e, Message)]
    assert [body.high[0][1] for body in bodies] == sizes


def test_payload_is_read_in_place_and_is_ours_alone(wires):
    """The buffer that a socket fills is the one that is handed on, and later frames never touch it."""
    d, li = wires.open()
    d.feed(li.piece_header(1, 0, 100_000))
    buffer = d.get_buffer()
    assert len(buffer) >= 100_000
    buffer[:100_000] = b"a" * 100_000
    (piece,) = d.received(100_000)
    buffer[0] = ord("b")
    assert piece.payload[0] == ord("b")
    buffer[0] = ord("a")
    d.feed(stream(li, [("piece", 100_000), ("piece", 5), ("signed", 40_000)], 1))
    assert bytes(piece.payload) == b"a" * 100_000


def test_unfinished_payload_is_counted_on_arrival(wires):
    d, li = wires.open()
    d.feed(li.piece_header(1, 0, 1000) + b"x" * 300)
    assert d.payload_bytes == 300
    d.feed(b"x" * 700 + li.send(Abort(), handle=1)[:5])
    assert d.payload_bytes == 1000


def test_small_pieces_in_one_read_are_counted_by_their_bytes(wires):
    """Bytes behind a piece are not moved once for every piece in front of them."""
    d, li = wires.open()
    data = (li.piece_header(1, 0, 1) + b"x") * (SCRATCH_BYTES // 13)
    buffer = d.get_buffer()
    assert len(buffer) >= len(data)
    buffer[: len(data)] = data
    where = d._start
    got = d.received(len(data))
    assert len(got) == SCRATCH_BYTES // 13
    assert d._end == where + len(data), "scratch was not rewritten"


@pytest.mark.parametrize("kind", Type, ids=lambda k: k.name)
def test_a_length_over_the_cap_is_refused_before_anything_is_allocated(wires, kind):
    for size in (MAX_BODY[kind] + 1, (1 << 32) - 1):
        for purpose in ("data", "control", "publish", "engine"):
            for receiver in wires.open(purpose):
                tracemalloc.start()
                try:
                    with pytest.raises(RemoteError):
                        receiver.feed(HEADER.pack(size, kind, 1, 0))
                    assert tracemalloc.get_traced_memory()[1] < 100_000
                finally:
                    tracemalloc.stop()
    assert MAX_BODY[kind] <= 65 * limits.MIB


def test_a_stranger_can_not_ask_for_memory(wires):
    """Before the token was shown, the largest frame is a HELLO."""
    _, li = wires.pair()
    for kind in Type:
        if kind not in (T.HELLO, T.ERROR):
            _, li = wires.pair()
            with pytest.raises(RemoteError):
                li.feed(HEADER.pack(min(MAX_BODY[kind], 1000), kind, 0, 0))
    assert max(MAX_BODY[T.HELLO], MAX_BODY[T.ERROR]) <= 4096


@pytest.mark.parametrize("size", [0, 1, SCRATCH_BYTES, limits.MIB, limits.MAX_PART_BYTES])
def test_parts_of_any_size_come_through_and_give_their_room_back(wires, size):
    d, li = wires.open("publish")
    payload = random.Random(size).randbytes(size)
    data = d.send(cell(payload)) + d.send(Passed(1, 9))
    got = drip(li, data, [77_777, 1_000_003])
    assert [e.type for e in got] == [T.CELL, T.PASSED]
    assert got[0].body == cell(payload)
    assert len(li.get_buffer()) <= 2 * MAX_BODY[T.PIECE]


def test_a_part_costs_its_buffer_and_one_copy(wires):
    d, li = wires.open("publish")
    data = d.send(cell(bytes(16 * limits.MIB)))
    tracemalloc.start()
    try:
        assert len(li.feed(data)) == 1
        assert tracemalloc.get_traced_memory()[1] < 34 * limits.MIB
    finally:
        tracemalloc.stop()


def test_a_part_over_the_limit_is_not_sent(wires):
    d, _ = wires.open("publish")
    with pytest.raises(RemoteError, match=r"CELL of \d+ bytes is over the limit"):
        d.send(cell(bytes(limits.MAX_PART_BYTES + limits.KIB)))


def test_messages_before_an_error_in_one_read_are_kept(wires):
    d, li = wires.open("publish")
    durable = Durable(1, Version(0, 2), bytes=3, changed=4, params=5)
    data = li.send(durable)
    li.fail(RetryableError("rank 2 of 4 is gone"))
    data += li.take_output()
    buffer = d.get_buffer()
    buffer[: len(data)] = data
    (event,) = d.received(len(data))
    assert event.body == durable
    assert "rank 2 of 4 is gone" in str(d.fault)
    with pytest.raises(RemoteError, match="rank 2 of 4 is gone"):
        d.received(0)


def test_edges(wires):
    d, li = wires.open()
    with pytest.raises(RemoteError, match="type 999 is unknown"):
        d.feed(HEADER.pack(0, 999, 0, 0))
    d, li = wires.open()
    with pytest.raises(RemoteError, match="without payload"):
        d.feed(HEADER.pack(0, T.PIECE, 1, 0))
    d, li = wires.open()
    with pytest.raises(RemoteError, match="over the limit"):
        li.send_signed(T.OPEN, bytes(limits.MAX_SIGNED_BYTES + 1), 1)
    assert d.feed(b"") == []
    with pytest.raises(RemoteError, match="unknown"):
        d.feed(b"\x80" * 20)
