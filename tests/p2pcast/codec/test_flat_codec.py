"""The flat format: an independent decoder in plain Python agrees, and every malformed payload is refused with its
cause.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec.flat_codec import decode_flat, encode_flat
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError


def reference_decode(payload):
    """docs/formats/delta-format.md §3, ``flat``, byte by byte."""
    version, gap_bytes, width, count = payload[:4]
    changed = int.from_bytes(payload[4:8], "little")
    assert version == 1
    streams, at = [], 8 + 8 * count
    for k in range(count):
        raw, stored = struct.unpack_from("<II", payload, 8 + 8 * k)
        part = payload[at : at + stored]
        at += stored
        streams.append(part if raw == stored else zstandard.ZstdDecompressor().decompress(part))
        assert len(streams[-1]) == raw
    assert at == len(payload)
    escape = {1: 255, 2: 65535}[gap_bytes]
    symbols = [int.from_bytes(bytes(s), "little") for s in zip(*streams[:gap_bytes], strict=True)]
    positions, gap, previous = [], 0, -1
    for symbol in symbols:
        gap += symbol
        if symbol != escape:
            previous += gap + 1
            positions.append(previous)
            gap = 0
    steps = streams[gap_bytes:]
    if width == 2:
        halves = [h for byte in steps[0] for h in (byte & 15, byte >> 4)]
        assert not any(halves[changed:])
        small, large = iter(steps[1]), iter(np.frombuffer(steps[2], "<u2").tolist())
        codes = [a if a < 15 else 15 + next(small) for a in halves[:changed]]
        codes = [next(large) if c == 270 else c for c in codes]
        assert next(small, None) is None
        assert next(large, None) is None
    else:
        codes = [int.from_bytes(bytes(s), "little") for s in zip(*steps, strict=True)]
    zigzag = [c + 1 for c in codes]
    signed = [z // 2 if z % 2 == 0 else -(z + 1) // 2 for z in zigzag]
    assert len(positions) == len(signed) == changed
    return positions, [s % (1 << 8 * width) for s in signed]


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1 << 32),
    density=st.sampled_from([0.0003, 0.003, 0.1, 0.9]),
)
@settings(max_examples=60, deadline=None)
def test_reference_decoder_agrees(width, seed, density):
    rng = np.random.default_rng(seed)
    words = 20_000
    positions = np.flatnonzero(rng.random(words) < density).astype(np.uint32)
    if not positions.size:
        return
    top = (1 << 8 * width) - 1
    near = rng.integers(1, 3, positions.size, dtype=np.uint64)
    far = rng.integers(1, top, positions.size, dtype=np.uint64, endpoint=True)
    steps = np.where(rng.random(positions.size) < 0.7, near, far).astype(f"<u{width}")
    payload = encode_flat(positions, steps, words)
    assert reference_decode(payload) == (positions.tolist(), steps.tolist())
    got = decode_flat(payload, Cell(0, 0, 0, words, width, 0))
    assert (got[0].tolist(), got[1].tolist()) == (positions.tolist(), steps.tolist())


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_round_trip_of_extreme_steps(width):
    half, top = 1 << (8 * width - 1), (1 << 8 * width) - 1
    values = [1, 2, 127, 128, half - 1, half, half + 1, top - 1, top]
    steps = np.array([v for v in values if 0 < v <= top], dtype=f"<u{width}")
    positions = np.arange(steps.size, dtype=np.uint32)
    cell = Cell(0, 0, 0, steps.size, width, 0)
    assert decode_flat(encode_flat(positions, steps, cell.words), cell)[1].tolist() == steps.tolist()


@pytest.mark.parametrize("code", [13, 14, 15, 16, 254, 255, 268, 269, 270, 271, 65533, 65534])
def test_round_trip_of_steps_at_stream_boundaries(code):
    z = code + 1
    step = (z // 2 if z % 2 == 0 else -(z + 1) // 2) % 65536
    payload = encode_flat(np.array([0], np.uint32), np.array([step], "<u2"), 1)
    assert reference_decode(payload) == ([0], [step])
    assert decode_flat(payload, Cell(0, 0, 0, 1, 2, 0))[1].tolist() == [step]


NO_STEPS = (b"\0", b"", b"")
"""Streams A, B, C of two steps of −1."""


def flat(changed=2, gaps=b"\0\0", steps=NO_STEPS, *, version=1, gap=1, width=2, count=None, table=None, tail=b""):
    """A payload of raw streams; any part can be overridden."""
    streams = (gaps, *steps)
    head = struct.pack("<BBBBI", version, gap, width, len(streams) if count is None else count, changed)
    sizes = table or [(len(s), len(s)) for s in streams]
    return head + b"".join(struct.pack("<II", *s) for s in sizes) + b"".join(streams) + tail


CELL = Cell(12, 0, 0, 1000, 2, 0)
HUGE = 0xFFFFFFFF


def test_builder_makes_valid_payloads():
    positions, steps = decode_flat(flat(), CELL)
    assert (positions.tolist(), steps.tolist()) == ([0, 1], [65535, 65535])
    assert decode_flat(flat(gaps=b"\xff\xff\xff\xe9\0"), CELL)[0].tolist() == [998, 999]


MALFORMED = {
    "empty": (b"", "too few for its header"),
    "header cut": (flat()[:7], "too few for its header"),
    "table cut": (flat()[:20], "too few for its table"),
    "version": (flat(version=2), "version 2"),
    "gap bytes 0": (flat(gap=0), "gaps of 0 bytes"),
    "gap bytes 3": (flat(gap=3), "gaps of 3 bytes"),
    "other words": (flat(width=4), "words of 4 bytes, the cell's have 2"),
    "stream missing": (flat(steps=(b"\0", b"")), "3 streams, not 4"),
    "stream count lies": (flat(count=255), "255 streams, not 4"),
    "nothing changed": (flat(0, b"", (b"", b"", b"")), "0 changed words"),
    "too many changed": (flat(1001, b"\0" * 1001, (b"\0" * 501, b"", b"")), "1001 changed words"),
    "leftover": (flat(tail=b"\0"), "do not fill"),
    "cut": (flat()[:-1], "do not fill"),
    "short gaps": (flat(gaps=b"\0"), "gaps of"),
    "short steps": (flat(steps=(b"", b"", b"")), "can't be 2 steps"),
    "claims 4 GiB of gaps": (flat(table=[(HUGE, 2), (1, 1), (0, 0), (0, 0)]), "gaps of"),
    "claims 4 GiB of halves": (flat(table=[(2, 2), (HUGE, 1), (0, 0), (0, 0)]), "can't be 2 steps"),
    "claims 4 GiB of small steps": (flat(table=[(2, 2), (1, 1), (HUGE, 0), (0, 0)]), "can't be 2 steps"),
    "claims 4 GiB of large steps": (flat(table=[(2, 2), (1, 1), (2, 0), (HUGE - 1, 0)]), "can't be 2 steps"),
    "stored in more": (flat(gaps=b"\0\0\0", table=[(2, 3), (1, 1), (0, 0), (0, 0)]), "stored in 3 bytes"),
    "not zstd": (flat(gaps=b"\0", table=[(2, 1), (1, 1), (0, 0), (0, 0)]), "stream 0"),
    "ends in an escape": (flat(gaps=b"\0\0\xff"), "gaps make"),
    "an escape too many": (flat(gaps=b"\0\xff\xff"), "gaps make 1 positions"),
    "a gap too many": (flat(gaps=b"\0\0\0"), "gaps make 3 positions"),
    "outside": (flat(gaps=b"\xff\xff\xff\xea\0"), "outside the cell's 1000 words"),
    "padding half set": (flat(1, b"\0", (b"\x10", b"", b"")), "large steps do not fit"),
    "small step missing": (flat(steps=(b"\x0f", b"", b"")), "large steps do not fit"),
    "small step left over": (flat(steps=(b"\x0e", b"\0", b"")), "large steps do not fit"),
    "odd large steps": (flat(steps=(b"\x0f", b"\xff", b"\xff")), "can't be 2 steps"),
    "large step missing": (flat(steps=(b"\x0f", b"\xff", b"")), "large steps do not fit"),
    "large step left over": (flat(steps=(b"\x0f", b"\xfe", b"\xff\0")), "large steps do not fit"),
    "large step that is small": (flat(steps=(b"\x0f", b"\xff", b"\x0d\x01")), "large steps do not fit"),
    "a step of zero": (flat(steps=(b"\x0f", b"\xff", b"\xff\xff")), "a step is zero"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_payload_is_refused(name):
    payload, message = MALFORMED[name]
    with pytest.raises(IntegrityError, match=f"cell 12: flat payload: .*{message}"):
        decode_flat(payload, CELL)


@pytest.mark.parametrize("width", [1, 4, 8])
def test_zero_step_is_refused_in_every_width(width):
    payload = flat(1, b"\0", (b"\xff",) * width, width=width)
    with pytest.raises(IntegrityError, match="a step is zero"):
        decode_flat(payload, Cell(0, 0, 0, 10, width, 0))


def test_number_of_gap_symbols_is_bounded():
    """The most gap symbols that a cell allows are accepted; one more is refused."""
    words = 255 * 4 + 1
    cell = Cell(0, 0, 0, words, 2, 0)
    assert decode_flat(flat(1, b"\xff" * 4 + b"\0"), cell)[0].tolist() == [words - 1]
    with pytest.raises(IntegrityError, match="1 to 5 are possible"):
        decode_flat(flat(1, b"\xff" * 5 + b"\0"), cell)
