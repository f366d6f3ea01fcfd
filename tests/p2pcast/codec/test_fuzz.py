"""Any payload decodes to the encoded change or raises IntegrityError, with memory bounded by the cell."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.layout import Cell
from p2pcast.codec.squash_cell import squash
from p2pcast.ground.errors import IntegrityError

CASES = {}
for _width in (1, 2, 4, 8):
    for _name in ("flat", "dense", "raw", "context"):
        _rng = np.random.default_rng(_width)
        _cell = Cell(1, 0, 1000, 3000, _width, 0, 100)
        _old = _rng.integers(0, 3, 3000).astype(f"<u{_width}")
        _new = _old + (_rng.random(3000) < 0.2).astype(_old.dtype) * _old.dtype.type(200)
        CASES[f"{_name}{8 * _width}"] = (_cell, _old, _new, codec.encode(_cell, _old, _new, codec=_name))


def decodes_or_refuses(case, payload):
    """Decode with the true digests; a payload that passes them must decode to the true change."""
    cell, old, new, coded = CASES[case]
    try:
        patch = codec.decode(cell, coded.codec, payload, old, coded.before, coded.after)
    except IntegrityError as error:
        refusal = str(error)
    else:
        target = old.copy()
        codec.apply(patch, target)
        assert target.tolist() == new.tolist()
        return
    assert "cell 1" in refusal


def squashes_or_refuses(case, payload):
    cell, _, _, coded = CASES[case]
    if coded.codec == codec.CONTEXT:
        return  # needs the base
    try:
        squash(cell, [(coded.codec, payload, coded.before, coded.after)])
    except IntegrityError as error:
        refusal = str(error)
    else:
        return
    assert "cell 1" in refusal


@pytest.mark.parametrize("case", CASES)
def test_every_truncation_is_refused(case):
    payload = CASES[case][3].payload
    for size in {*range(min(len(payload), 120)), *range(0, len(payload), 41), len(payload) - 1}:
        decodes_or_refuses(case, payload[:size])


@pytest.mark.parametrize("case", CASES)
def test_flipped_bits_are_refused_or_harmless(case):
    payload = CASES[case][3].payload
    for at in [*range(min(len(payload), 80)), *range(80, len(payload), 97)]:
        for bit in range(8):
            damaged = bytearray(payload)
            damaged[at] ^= 1 << bit
            decodes_or_refuses(case, bytes(damaged))


@given(case=st.sampled_from(sorted(CASES)), payload=st.binary(max_size=200))
@example(case="flat16", payload=b"")
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(case, payload):
    decodes_or_refuses(case, payload)
    squashes_or_refuses(case, payload)


@given(case=st.sampled_from(sorted(CASES)), data=st.data())
@settings(max_examples=300, deadline=None)
def test_spliced_payloads_are_refused_or_exact(case, data):
    """A valid head, so that the fuzz passes the first checks, and random bytes behind it."""
    payload = CASES[case][3].payload
    begin = data.draw(st.integers(0, min(len(payload), 90)))
    end = data.draw(st.integers(begin, min(len(payload), begin + 20)))
    middle = data.draw(st.binary(max_size=20))
    decodes_or_refuses(case, payload[:begin] + middle + payload[end:])
    squashes_or_refuses(case, payload[:begin] + middle + payload[end:])


def test_stated_sizes_do_not_allocate_memory():
    """Every size field of every payload at its largest value: refused within a few times the cell's bytes."""
    tracemalloc.start()
    try:
        for case, (cell, _, _, coded) in CASES.items():
            payload = coded.payload
            tracemalloc.reset_peak()
            base = tracemalloc.get_traced_memory()[0]
            for at in range(0, min(len(payload), 100), 4):
                decodes_or_refuses(case, payload[:at] + b"\xff\xff\xff\xff" + payload[at + 4 :])
            assert tracemalloc.get_traced_memory()[1] - base < 40 * cell.nbytes + (1 << 20)
    finally:
        tracemalloc.stop()
