"""The digest against a reference that follows docs/formats/delta-format.md §2 in plain integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import kernels
from p2pcast.codec.digest import TABLE, digest, digest_change, seed
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.ground.errors import UsageError

MASK = (1 << 64) - 1


def reference_mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def reference_digest(words, cell):
    lanes = {1: 1, 2: 1, 4: 2, 8: 4}[cell.word_bytes]
    total = 0
    for k, word in enumerate(words.tolist()):
        for part in range(lanes):
            lane = (word >> (16 * part)) & 0xFFFF
            i = (cell.start + k) * lanes + part
            t = reference_mix(0x9E3779B97F4A7C15 * (i % 1024 + 1) & MASK)
            m = reference_mix((reference_mix(cell.tensor + 1) + 0x9E3779B97F4A7C15 * (i // 1024 + 1)) & MASK) | 1
            total += lane * t * m
    return total & MASK


def words_of(rng, width, count):
    return np.frombuffer(rng.bytes(width * count), dtype=f"<u{width}")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, 1024), (1023, 2), (1, 1023), (777, 2500), (255, 257), (3_000_000_000, 40)]
)
def test_digest_matches_reference_at_any_alignment(width, start, count):
    words = words_of(np.random.default_rng(start + count), width, count)
    cell = Cell(0, 7, start, count, width, 0)
    assert digest(words, cell) == reference_digest(words, cell)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_largest_lanes_do_not_overflow_the_partial_sums(width):
    words = np.full(4096, (1 << 8 * width) - 1, dtype=f"<u{width}")
    cell = Cell(0, 0, 0, words.size, width, 0)
    assert digest(words, cell) == reference_digest(words, cell)


def test_digest_of_a_known_cell():
    """Pins the constants: the value was computed once from the specification."""
    cell = Cell(0, 3, 1020, 8, 2, 0)
    words = np.arange(1, 9, dtype="<u2")
    assert digest(words, cell) == reference_digest(words, cell) == 0xD87D486066D1F13F


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 3000),
    cell_words=st.integers(1, 900),
    cut=st.integers(1, 2999),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=60, deadline=None)
def test_digests_of_any_cells_add_up(width, count, cell_words, cut, seed):
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[width]
    tensor = Tensor("t", dtype, (count,))
    layout = Layout([tensor], cell_words=cell_words, cuts={0: [cut]} if cut < count else None)
    words = words_of(np.random.default_rng(seed), width, count)
    whole = digest(words, Cell(0, 0, 0, count, width, 0))
    parts = [digest(words[c.start : c.start + c.words], c) for c in layout.cells]
    assert sum(parts) & MASK == whole


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    start=st.integers(0, 5000),
    seed=st.integers(0, 1 << 32),
    changed=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_digest_changes_by_digest_change(width, start, seed, changed):
    rng = np.random.default_rng(seed)
    old = words_of(rng, width, 2000)
    new = old.copy()
    positions = np.sort(rng.choice(2000, changed, replace=False)).astype(np.uint32)
    new[positions] = words_of(rng, width, changed)
    cell = Cell(0, 1, start, 2000, width, 0)
    moved = digest_change(positions, old[positions], new[positions], cell)
    assert (digest(old, cell) + moved) & MASK == digest(new, cell)


def test_positions_tensors_and_order_matter():
    words = np.array([1, 2, 3], dtype="<u2")
    seen = {digest(words, Cell(0, t, s, 3, 2, 0)) for t in range(4) for s in (0, 1, 1024)}
    seen |= {digest(words[::-1].copy(), Cell(0, 0, 0, 3, 2, 0))}
    assert len(seen) == 13


def test_read_only_unaligned_and_strided_arrays_are_accepted():
    raw = np.random.default_rng(0).bytes(2 * 1001 + 1)
    unaligned = np.frombuffer(raw, dtype="<u2", offset=1)
    cell = Cell(0, 0, 5, 1001, 2, 0)
    assert digest(unaligned, cell) == reference_digest(unaligned, cell)
    strided = np.repeat(unaligned, 2)[::2]
    assert digest(strided, cell) == digest(unaligned, cell)


@pytest.mark.parametrize("words", [np.zeros(3, "<u2"), np.zeros(4, "<i2"), np.zeros(4, "<u4"), np.zeros((2, 2), "<u2")])
def test_array_that_does_not_fit_its_cell_is_refused(words):
    with pytest.raises(UsageError, match=r"cell 9: .*need 4 unsigned words of 2 bytes"):
        digest(words, Cell(9, 0, 0, 4, 2, 0))


@pytest.mark.parametrize("kind", ["<u1", "<u2"])
def test_two_block_sum_matches_single_blocks(kind):
    """On processors with fused multiply-add instructions, whole blocks go through these."""
    rng = np.random.default_rng(3)
    lanes = rng.integers(0, 1 << 8 * np.dtype(kind).itemsize, 3000).astype(kind)
    lanes[700:1500] = np.iinfo(kind).max
    lanes = kernels.readonly(lanes)
    for first, begin in ((0, 0), (1 << 40, 0), (5, 1019)):
        in_ones = [kernels.digest_part(lanes, k, k + 1, first, seed(9), TABLE) for k in range(begin, lanes.size)]
        whole = kernels.digest_part(lanes, begin, lanes.size, first, seed(9), TABLE)
        assert int(whole) == sum(map(int, in_ones)) % (1 << 64)
