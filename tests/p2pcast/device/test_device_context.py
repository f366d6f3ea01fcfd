"""Codec ``context`` on a device produces the host's bytes for any cell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from p2pcast.codec import class_window
from p2pcast.codec.context_codec import SHIFTS, SURVEYED_WORDS, census_stride, encode_context
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.kernels import readonly
from p2pcast.codec.layout import Cell
from p2pcast.device import Changes, encode_context_on_device
from p2pcast.device.device_ranks import census
from p2pcast.device.words import SIGNED
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

WIDTHS = (1, 2, 4, 8)


def weights(draw: np.random.Generator, width: int, count: int) -> np.ndarray:
    """Words with the levels of weights; single bytes are random."""
    if width == 1:
        return draw.integers(0, 256, count).astype(np.uint8)
    values = draw.normal(0, 0.02, count)
    if width == 2:
        return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    return values.astype(f"<f{width}").view(f"<u{width}")


def a_change(width: int, count: int, share: float, seed: int) -> tuple[np.ndarray, Changes, np.ndarray]:
    """(old words, changes, steps); at least one change."""
    draw = np.random.default_rng(seed)
    old = weights(draw, width, count)
    chosen = draw.random(count) < share
    chosen[draw.integers(count)] = True
    positions = np.flatnonzero(chosen).astype(np.uint32)
    steps = draw.choice([1, 1, 1, 2, 3, 100, 255], positions.size).astype(word_dtype(width))
    steps[draw.random(positions.size) < 0.5] *= word_dtype(width).type(2 ** (8 * width) - 1)
    held = old[positions]
    return old, Changes(positions, held, held + steps), steps


def row_of(words: np.ndarray) -> torch.Tensor:
    row = torch.from_numpy(words.view(f"<i{words.itemsize}") if words.itemsize > 1 else words.copy())
    return row.view(SIGNED[words.itemsize]).to(DEVICE)


def agree(cell: Cell, old: np.ndarray, changes: Changes, steps: np.ndarray) -> bool:
    on_device = encode_context_on_device(cell, row_of(old), changes, steps)
    return on_device == encode_context(cell, old, changes.positions, steps)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 4095, 4097, 50_001])
def test_device_and_host_produce_the_same_bytes(width, share, count):
    for row_words in (0, 7):
        cell = Cell(2, 5, 999, count, width, 0, row_words)
        assert agree(cell, *a_change(width, count, share, count))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "blocks", [SURVEYED_WORDS * 3 // 64, SURVEYED_WORDS * 3 // 64 + 1, SURVEYED_WORDS * 3 // 64 + 3]
)
@pytest.mark.parametrize("more", [0, 1, 63])
def test_device_census_samples_the_hosts_blocks(width, blocks, more):
    """Holds whether or not the shorter last block is sampled."""
    words = weights(np.random.default_rng(width), width, 64 * blocks + more)
    pace, shift, counts = census_stride(words.size), SHIFTS[width][0], np.zeros(256, np.int64)
    assert pace == 3
    class_window.census(readonly(words), pace, shift, counts)
    assert census(row_of(words), pace, shift).tolist() == counts.tolist()


def test_equal_words_and_words_of_every_level():
    """All words in one class; words at every level."""
    for old in (np.zeros(3000, np.uint16), np.arange(65536).astype(np.uint16)):
        positions = np.arange(0, old.size, 3).astype(np.uint32)
        steps, held = np.ones(positions.size, np.uint16), old[positions]
        assert agree(Cell(0, 0, 0, old.size, 2, 0), old, Changes(positions, held, held + steps), steps)


def test_threads_encode_concurrently():
    changes = [a_change(2, 20_000, 0.01, seed) for seed in range(8)]
    cell = Cell(0, 0, 0, 20_000, 2, 0, 100)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda change: agree(cell, *change), changes))
