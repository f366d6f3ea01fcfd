"""torch's operations against the compiled kernels, and against plain loops over words."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec.digest import digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.device import class_ranks, compare, device_ranks, digest_box, digest_row, to_int, words_of
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

WIDTHS = (1, 2, 4, 8)
SHIFTS = [(1, 3), (1, 4), (2, 8), (2, 11), (4, 24), (8, 56)]


def random_words(width: int, count: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(width * count), word_dtype(width)).copy()


def tensor(words: np.ndarray) -> torch.Tensor:
    """Words as a device holds them: bytes of some dtype, with NaNs and infinities among the values."""
    kinds = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    return (
        torch.frombuffer(bytearray(words), dtype=kinds[words.itemsize])
        if words.size
        else torch.zeros(0, dtype=kinds[words.itemsize])
    ).to(DEVICE)


def test_only_this_package_needs_torch():
    """Daemons, commands and codec start on a machine without torch."""
    modules = "p2pcast.offline, p2pcast.cli.delta, p2pcast.codec.squash_cell, rollout_node.peer, trainer_node.hub"
    code = f"import sys; import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 3, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("first", [0, 1, 255, 1024, (1 << 31) + 77])
def test_digest_of_a_row(width, count, first):
    words = random_words(width, count)
    assert to_int(digest_row(tensor(words), first, 5)) == digest(words, Cell(0, 5, first, count, width, 0))


def test_digest_of_the_largest_lanes():
    """Products and sums wrap as unsigned numbers do."""
    for width in WIDTHS:
        words = np.full(4096, -1, f"<i{width}").view(f"<u{width}")
        assert to_int(digest_row(tensor(words), 3, 0)) == digest(words, Cell(0, 0, 3, 4096, width, 0))


@given(
    width=st.sampled_from(WIDTHS),
    shape=st.lists(st.integers(0, 5), max_size=4),
    start=st.integers(0, 5000),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_digest_of_a_box(width, shape, start, data):
    strides: list[int] = []
    for size in reversed(shape):
        inner = 1 if not strides else strides[0] * max(1, shape[len(shape) - len(strides)])
        strides.insert(0, inner * data.draw(st.integers(1, 40)) if size else 1)
    words = random_words(width, int(np.prod(shape, dtype=np.int64)), 1)
    at = [start + int(np.dot(index, strides)) if strides else start for index in np.ndindex(*shape)]
    positions = (np.array(at, np.int64) - start).astype(np.uint32)
    cell = Cell(0, 9, start, int(positions.max(initial=0)) + 1, width, 0)
    found = to_int(digest_box(tensor(words).view(shape), start, strides, 9))
    assert found == digest_change(positions, np.zeros_like(words), words, cell) & ((1 << 64) - 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_digest_of_a_transposed_box(width):
    """Engines store some matrices transposed."""
    words = random_words(width, 12 * 20)
    transposed = tensor(words).view(12, 20).t()  # [20, 12]: index (i, j) is word 20 j + i
    assert to_int(digest_box(transposed, 100, (1, 20), 2)) == digest(words, Cell(0, 2, 100, 240, width, 0))


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_finds_changes_part_by_part(width):
    draw = np.random.default_rng(width)
    old = random_words(width, 10_000)
    new = old.copy()
    chosen = draw.random(10_000) < 0.03
    new[chosen] ^= new.dtype.type(1 << 8 * width - 1)
    parts = [(0, 1), (1, 900), (1000, 64), (1064, 5000), (9999, 1)]
    found = compare(tensor(old), tensor(new), parts, 16)
    assert found is not None
    for (first, count), changes in zip(parts, found, strict=True):
        expected = np.flatnonzero(old[first : first + count] != new[first : first + count])
        assert changes.positions.tolist() == expected.tolist()
        assert changes.old.tolist() == old[first + expected].tolist()
        assert changes.new.tolist() == new[first + expected].tolist()
        assert changes.positions.dtype == np.uint32
        assert changes.old.dtype == changes.new.dtype == word_dtype(width)


def test_compare_returns_none_above_its_share():
    old = torch.zeros(1600, dtype=torch.int16, device=DEVICE)
    new = old.clone()
    new[:100] = 1
    assert compare(old, new, [(0, 1600)], 16) is not None
    new[100] = 1
    assert compare(old, new, [(0, 1600)], 16) is None
    assert compare(old, old, [(0, 800), (800, 800)], 16) is not None


def reference_ranks(words, positions, shift, base, top):
    """Count word by word."""
    bits = 8 * words.itemsize
    kinds = [min(max(((w << 1) % (1 << bits) >> shift) - base, 0), top) for w in words.tolist()]
    met, found, classes = [0] * 16, [], []
    chosen = set(positions.tolist())
    for at, kind in enumerate(kinds):
        if at in chosen:
            found.append(met[kind])
            classes.append(kind)
        met[kind] += 1
    return found, classes


@pytest.mark.parametrize(("width", "shift"), SHIFTS)
@pytest.mark.parametrize("share", [0.01, 1.0])
@pytest.mark.parametrize("count", [1, 64, 3001])
@pytest.mark.parametrize("window", [(0, 0), (1, 15), (110, 12)])
def test_class_ranks_match_plain_counting(monkeypatch, width, shift, share, count, window):
    monkeypatch.setattr(device_ranks, "CHUNK_WORDS", 1024)
    monkeypatch.setattr(device_ranks, "CHUNK_CHANGES", 700)
    draw = np.random.default_rng(count)
    words = random_words(width, count)
    if width == 2:
        words = draw.normal(0, 0.02, count).astype(np.float16 if shift == 11 else np.float32)
        words = words.view(np.uint16) if shift == 11 else (words.view(np.uint32) >> 16).astype(np.uint16)
    positions = np.flatnonzero(draw.random(count) < share)
    found, classes = class_ranks(tensor(words), torch.from_numpy(positions).to(DEVICE), shift, *window)
    assert (found.tolist(), classes.tolist()) == reference_ranks(words, positions, shift, *window)


def test_words_keep_their_bits():
    row = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16, device=DEVICE)
    assert words_of(row).tolist() == [0x7FC0, -0x8000, 0x7F80]
    assert words_of(row.view(torch.uint8)).dtype == torch.uint8
