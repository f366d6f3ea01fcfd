"""The context format: an independent decoder in plain Python agrees, and every coded cell decodes to its words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import class_ranks, class_window
from p2pcast.codec import gap_entropy_coder as geometric
from p2pcast.codec.context_codec import SHIFTS, choose_window, decode_context, encode_context
from p2pcast.codec.digest import digest
from p2pcast.codec.kernels import readonly
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError

WIDTHS = (1, 2, 4, 8)
ROOTS = [int((1 << 32) * 2 ** (-j / 8)) for j in range(8)]


class Bits:
    """The arithmetic decoder of docs/formats/delta-format.md §3, one bit at a time."""

    def __init__(self, data):
        self.data, self.at = bytes(data), 8
        self.low, self.high = 0, 2**64 - 1
        self.code = int.from_bytes(self.data[:8].ljust(8, b"\0"), "big")

    def bit(self, probability):
        middle = self.low + (self.high - self.low >> 16) * probability
        found = int(self.code <= middle)
        if found:
            self.high = middle
        else:
            self.low = middle + 1
        while self.low >> 32 == self.high >> 32:
            self.low = self.low << 32 & 2**64 - 1
            self.high = self.high << 32 & 2**64 - 1 | 2**32 - 1
            four = self.data[self.at : self.at + 4].ljust(4, b"\0")
            self.code = self.code << 32 & 2**64 - 1 | int.from_bytes(four, "big")
            self.at += 4
        return found

    def ended(self):
        """Whether an encoder would have ended here."""
        return len(self.data) == self.at - 8 + next(
            j for j in range(1, 5) if self.low < ((self.low >> 64 - 8 * j) + 1 << 64 - 8 * j) <= self.high
        )

    def learned(self, models, key):
        p = models.get(key, 32768)
        found = self.bit(p)
        models[key] = p + (65536 - p >> 5) if found else p - (p >> 5)
        return found


def model(mean):
    low_bits = max(0, mean // 8 - 1)
    rate = 2**32 - (ROOTS[mean % 8] >> mean // 8)
    for _ in range(low_bits):
        rate = rate * rate >> 32
    left, starts = 2**32, []
    for symbol in range(32):
        starts.append(symbol + (4064 * (2**32 - left) >> 32))
        left = left * rate >> 32
    return low_bits, [*starts, 4096]


def reference_decode(payload, old, start):
    """docs/formats/delta-format.md §3, ``context``, byte by byte. ``start``: the cell's first word in its tensor."""
    version, width, shift, base, top, flags = payload[:6]
    coded = int.from_bytes(payload[6:10], "little")
    assert version == 1
    at = 10

    def varint():
        nonlocal at
        value = scale = 0
        while True:
            value |= (payload[at] & 127) << scale
            at += 1
            if payload[at - 1] < 128:
                return value
            scale += 7

    changed = varint()
    row_words = varint() if flags & 1 else 0
    classes = []
    for _ in range(top + 1):
        members = varint()
        mean = payload[at] if members else 0
        at += 1 if members else 0
        classes.append((members, mean))
    words, raw_bytes, told_bytes = varint(), varint(), varint()
    states = [int.from_bytes(payload[at + 4 * k : at + 4 * k + 4], "little") for k in range(4)]
    at += 16
    stream = iter(np.frombuffer(payload[at : at + 2 * words], "<u2").tolist())
    at += 2 * words
    raw = int.from_bytes(payload[at : at + raw_bytes], "little")
    at += raw_bytes
    directions, rest = payload[at : at + told_bytes], payload[at + told_bytes :]

    def take(bits):
        nonlocal raw
        value = raw & (1 << bits) - 1
        raw >>= bits
        return value

    gaps, number = [], 0
    for members, mean in classes:
        low_bits, starts = model(mean)
        gaps.append([])
        for _ in range(members):
            state = states[number % 4]
            slot = state % 4096
            symbol = max(s for s in range(32) if starts[s] <= slot)
            state = (starts[symbol + 1] - starts[symbol]) * (state >> 12) + slot - starts[symbol]
            if state < 32768:
                state = state << 16 | next(stream)
            states[number % 4] = state
            number += 1
            if symbol == 31:
                length = take(5)
                symbol = 31 + (1 << length | take(length)) - 1
            gaps[-1].append(symbol << low_bits | take(low_bits))
    assert states == [32768] * 4
    assert next(stream, None) is None
    assert raw == 0

    bits = 8 * width
    levels = [(w << 1) % (1 << bits) >> shift for w in old.tolist()]
    members_of = [[p for p, level in enumerate(levels) if min(max(level - base, 0), top) == c] for c in range(top + 1)]
    positions = []
    for c, found in enumerate(gaps):
        rank = -1
        for gap in found:
            rank += gap + 1
            positions.append(members_of[c][rank])
    positions.sort()
    assert len(positions) == changed

    ups, models, decoder = [], {}, Bits(directions)
    above, beside, row = {}, (0, 0), None
    for k, p in enumerate(positions):
        if not flags & 1:
            ups.append(directions[k // 8] >> k % 8 & 1)
            continue
        column = (start + p) % row_words
        if row != (start + p) // row_words:
            row, beside = (start + p) // row_words, (0, 0)
        sign = int(old[p]) >> bits - 1 if flags & 2 else 0
        up = decoder.learned(models, (sign, above.get(column, (0, 0)), beside))
        ups.append(up)
        above[column] = (up + 1, above.get(column, (0, 0))[0])
        beside = (up + 1, beside[0])
    assert not flags & 1 or decoder.ended()

    steps, lengths, seconds, decoder = [], {}, {}, Bits(rest)
    for p, up in zip(positions, ups, strict=True):
        context = min(max(base + top - levels[p], 0), 31)
        size = 1
        if coded >> context & 1:
            length = 0
            while length < bits - 1 and decoder.learned(lengths, (context, length)):
                length += 1
            if length == bits - 1:
                size <<= length
            else:
                for step in range(length):
                    bit = decoder.learned(seconds, (context, length)) if step == 0 else decoder.bit(32768)
                    size = size << 1 | bit
        goes_down = (1 - up) ^ (int(old[p]) >> bits - 1)
        steps.append((-size if goes_down else size) % (1 << bits))
    assert decoder.ended() if lengths else not rest
    return positions, steps


def weights(rng, words, width):
    """Old words with the magnitudes of weights, if the width is a float's."""
    if width == 2:
        return (rng.normal(0, 0.02, words).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    if width == 4:
        return rng.normal(0, 0.02, words).astype("<f4").view("<u4")
    if width == 8:
        return rng.normal(0, 0.02, words).astype("<f8").view("<u8")
    return rng.integers(0, 256, words).astype("<u1")


def some_steps(rng, count, width):
    """Mostly ±1, and some steps of every size."""
    signs = rng.choice([-1, 1], count)
    sizes = np.where(rng.random(count) < 0.9, 1, 2.0 ** rng.uniform(0, 8 * width - 1.01, count)).astype(np.int64)
    steps = (signs * sizes).astype(np.int64).astype(f"<u{width}")
    steps[steps == 0] = 1
    return steps


def there_and_back(cell, old, positions, steps, row_words=0):
    cell = replace(cell, row_words=row_words)
    payload = encode_context(cell, old, positions, steps)
    found = decode_context(payload, cell, old, audit=True)
    assert [row.tolist() for row in found[:3]] == [positions.tolist(), old[positions].tolist(), steps.tolist()]
    assert found[3] == digest(old, cell)
    return payload


@given(width=st.sampled_from(WIDTHS), seed=st.integers(0, 1 << 32), density=st.sampled_from([0.0003, 0.01, 0.2, 1.0]),
       words=st.sampled_from([1, 63, 64, 65, 1000, 9000]), row_words=st.sampled_from([0, 1, 7, 64]))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_reference_decoder_agrees(width, seed, density, words, row_words):
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, 1000))
    cell = Cell(1, 3, start, words, width, 0)
    old = weights(rng, words, width)
    chosen = np.flatnonzero(rng.random(words) < density) if density < 1 else np.arange(words)
    positions = (chosen if chosen.size else rng.integers(0, words, 1)).astype(np.uint32)
    payload = there_and_back(cell, old, positions, some_steps(rng, positions.size, width), row_words)
    found = reference_decode(payload, old, start)
    assert found == (positions.tolist(), some_steps_of(payload, cell, old))


def some_steps_of(payload, cell, old):
    return decode_context(payload, cell, old, audit=False)[2].tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_round_trip_of_every_kind_of_step(width):
    """Sign flips, wraparound, the largest step, NaN, infinities and −0, all changed."""
    edge = 1 << 8 * width - 1
    old = np.array([0, edge, 1, edge - 1, edge + 1, 2 * edge - 1, edge, 0], f"<u{width}").repeat(20)
    new = np.array([edge, 0, edge + 1, 0, edge - 1, 0, edge + 1, 1], f"<u{width}").repeat(20)
    cell = Cell(0, 0, 0, old.size, width, 0)
    payload = there_and_back(cell, old, np.arange(old.size, dtype=np.uint32), new - old, 16)
    assert reference_decode(payload, old, 0)[1] == (new - old).tolist()


def test_unchanged_rows_cost_almost_no_bits():
    rng = np.random.default_rng(5)
    old = weights(rng, 1 << 20, 2)
    positions = np.flatnonzero(rng.random(1 << 20) < 0.1).astype(np.uint32)
    touched = positions[positions < 1 << 16]
    cell = Cell(0, 0, 0, 1 << 20, 2, 0)
    part = Cell(0, 0, 0, 1 << 16, 2, 0)
    steps = some_steps(rng, touched.size, 2)
    alone = encode_context(part, old[: 1 << 16], touched, steps)
    among_others = there_and_back(cell, old, touched, steps)
    assert len(among_others) < 1.02 * len(alone) + 64


def test_columns_with_one_direction_cost_few_bits():
    rng = np.random.default_rng(6)
    rows, columns = 2000, 64
    old = weights(rng, rows * columns, 2) & np.uint16(0x7FFF)
    positions = np.flatnonzero(rng.random(rows * columns) < 0.1).astype(np.uint32)
    ways = rng.choice([1, 65535], columns).astype(np.uint16)
    cell = Cell(0, 0, 0, old.size, 2, 0)
    steps = ways[positions % columns]
    directions = there_and_back(cell, old, positions, steps, columns)
    assert len(directions) < len(there_and_back(cell, old, positions, steps, 0)) - positions.size / 10


@pytest.mark.parametrize("row_words", [0, 64, 1 << 21])
def test_steps_with_one_ulp_direction_cost_no_direction_bits(row_words):
    """The values move up or down with the old words' signs."""
    rng = np.random.default_rng(9)
    old = weights(rng, 1 << 16, 2)
    positions = np.flatnonzero(rng.random(old.size) < 0.2).astype(np.uint32)
    cell = Cell(0, 0, 0, old.size, 2, 0)
    payloads = [
        there_and_back(cell, old, positions, steps.astype(np.uint16), row_words)
        for steps in (
            np.full(positions.size, 1),
            np.full(positions.size, 0xFFFF),
            rng.choice([1, 0xFFFF], positions.size),
        )
    ]
    assert reference_decode(payloads[1], old, 0)[1] == [0xFFFF] * positions.size
    assert max(map(len, payloads[:2])) < len(payloads[2]) - 0.8 * positions.size / 8


def test_windows_follow_the_dtype():
    rng = np.random.default_rng(7)
    values = rng.normal(0, 0.02, 1 << 16)
    for kind, shift in (("f2", 11), ("f4", 24)):
        old = values.astype(f"<{kind}").view(f"<u{kind[1]}")
        chance = 2.0 ** -np.floor(np.log2(np.abs(values) + 1e-9)) * 1e-4
        held = old[rng.random(old.size) < np.minimum(chance, 1)]
        finest = min(SHIFTS[int(kind[1])])
        levels = np.bincount((held << held.dtype.type(1)) >> held.dtype.type(finest), minlength=256)
        counts = np.zeros(256, np.int64)
        class_window.census(readonly(old), 1, finest, counts)
        assert choose_window(Cell(0, 0, 0, old.size, int(kind[1]), 0), counts, levels)[0].shift == shift


def test_models_match_the_specification():
    for mean in range(geometric.MEANS):
        low_bits, starts = model(mean)
        assert geometric.model(mean) == (low_bits, starts)
        assert all(a < b for a, b in pairwise(starts))


def test_positions_depend_on_the_old_words():
    """Words of other magnitudes have other ranks. A rank without a word is refused by the decoder, the rest by the
    digests.
    """
    rng = np.random.default_rng(8)
    old = weights(rng, 1 << 17, 2)
    cell = Cell(4, 0, 0, old.size, 2, 0)
    chance = np.minimum(1.0, 1e-4 / np.abs((old.astype(np.uint32) << 16).view(np.float32) + 1e-12))
    positions = np.flatnonzero(rng.random(old.size) < chance).astype(np.uint32)
    payload = there_and_back(cell, old, positions, some_steps(rng, positions.size, 2))
    with pytest.raises(IntegrityError, match="cell 4"):
        decode_context(payload, cell, np.full(old.size, 0x4000, "<u2"), audit=True)


@pytest.mark.parametrize("classes", [1, 4, 8, 12, 16])
def test_unrank_is_the_inverse_of_rank(classes):
    rng = np.random.default_rng(classes)
    old = rng.integers(0, 1 << 16, 64 * 200).astype("<u2")
    positions = np.flatnonzero(rng.random(old.size) < 0.07).astype(np.uint32)
    levels = ((old << np.uint16(1)) >> np.uint16(8)).astype(np.uint8)
    window = np.clip(levels.astype(int) - 100, 0, classes - 1)
    bases, cursor = np.zeros(16, np.uint32), np.zeros(16, np.uint64)
    ends = np.bincount(window[positions], minlength=classes).cumsum()
    cursor[1:classes] = ends[:-1]
    found = np.empty(positions.size, np.uint32)
    class_ranks.rank(old, 0, positions, levels[positions], 0, 0, 8, 100, classes - 1, bases, cursor, found)
    for c, row in enumerate(np.split(found, ends[:-1])):
        members = np.flatnonzero(window == c)
        assert row.tolist() == np.searchsorted(members, positions[window[positions] == c]).tolist()
