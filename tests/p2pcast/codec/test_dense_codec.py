"""The dense format, and hostile zstd frames."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard

from p2pcast.codec.dense_codec import decode_dense, encode_dense, estimate_dense, unpack_stream
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 5000])
def test_round_trip(width, count):
    for raw in (np.random.default_rng(0).bytes(width * count), bytes(width * count), bytes(range(256)) * width * count):
        words = np.frombuffer(raw, dtype=f"<u{width}", count=count)
        assert decode_dense(encode_dense(words), Cell(0, 0, 0, count, width, 0)).tolist() == words.tolist()


def test_incompressible_planes_are_stored_raw():
    words = np.array([0x1234, 0xABCD], dtype="<u2")
    assert encode_dense(words) == struct.pack("<BBHIII", 1, 2, 0, 2, 2, 2) + bytes([0x34, 0xCD, 0x12, 0xAB])


def test_estimate_is_close():
    rng = np.random.default_rng(0)
    words = (rng.standard_normal(1 << 18, dtype=np.float32).view("<u4") >> 16).astype("<u2")
    assert estimate_dense(words) == pytest.approx(len(encode_dense(words)), rel=0.05)


def dense(planes=(b"\0" * 4, b"\1" * 4), *, version=1, width=2, zero=0, count=4, sizes=None, tail=b""):
    head = struct.pack("<BBHI", version, width, zero, count)
    return head + struct.pack("<2I", *(sizes or map(len, planes))) + b"".join(planes) + tail


CELL = Cell(12, 0, 0, 4, 2, 0)
FRAME = zstandard.ZstdCompressor().compress(b"\7" * 5000)
MALFORMED = {
    "empty": (b"", "too few"),
    "header cut": (dense()[:15], "too few"),
    "version": (dense(version=0), "version 0"),
    "other words": (dense(width=4), "words of 4 bytes"),
    "reserved bits": (dense(zero=1), "reserved"),
    "other count": (dense(count=5), "5 words for a cell of 4"),
    "claims 4 GiB": (dense(count=0xFFFFFFFF), "words for a cell of 4"),
    "leftover": (dense(tail=b"\0"), "planes of 8 bytes in a payload of 25"),
    "cut": (dense()[:-1], "planes of 8 bytes"),
    "size lies": (dense(sizes=(0xFFFFFFFF, 4)), "planes of"),
    "plane too long": (dense(planes=(b"\0" * 5, b"\1" * 4)), "plane 0: stored in 5 bytes"),
    "not zstd": (dense(planes=(b"\0" * 4, b"\1\2\3")), "plane 1: .*zstd frame"),
    "nothing": (dense(planes=(b"", b"\1" * 4)), "plane 0: .*zstd frame"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_payload_is_refused(name):
    payload, message = MALFORMED[name]
    with pytest.raises(IntegrityError, match=f"cell 12: dense payload: .*{message}"):
        decode_dense(payload, CELL)


def frame_that_claims(size):
    """A well-formed frame header that states ``size`` bytes, followed by one block of three bytes."""
    block = struct.pack("<I", 1 | 3 << 3)[:3] + b"abc"
    return b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", size) + block


HOSTILE = {
    "claims an exabyte": frame_that_claims(1 << 60),
    "claims one byte more": zstandard.ZstdCompressor().compress(b"\7" * 5001),
    "claims the size, holds less": frame_that_claims(5000),
    "does not say its size": zstandard.ZstdCompressor(write_content_size=False).compress(b"\7" * 5000),
    "another frame behind": FRAME + FRAME,
    "bytes behind": FRAME + b"\0",
    "cut": FRAME[:-1],
    "skippable": struct.pack("<II", 0x184D2A50, 4) + b"\0" * 4,
    "skippable, then the frame": struct.pack("<II", 0x184D2A50, 4) + b"\0" * 4 + FRAME,
}


def test_plain_frame_is_accepted():
    assert bytes(unpack_stream(memoryview(FRAME), 5000, "x")) == b"\7" * 5000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_are_refused(name):
    with pytest.raises(IntegrityError, match="cell 3: plane 0"):
        unpack_stream(memoryview(HOSTILE[name]), 5000, "cell 3: plane 0")
