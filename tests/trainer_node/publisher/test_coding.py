"""Coding with torch's operations: what they make decodes to the same words as what the host's coder makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pcast.codec.cell import DENSE, FLAT, decode, digest, encode
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Cell
from trainer_node.coding import encode_on_device

WORDS = 50_000


def states(width: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    old = np.frombuffer(draw.bytes(WORDS * width), word_dtype(width)).copy()
    new = old.copy()
    chosen = draw.random(WORDS) < share
    new[chosen] += draw.integers(1, 120, chosen.sum()).astype(new.dtype)
    return old, new


def tensor(words: np.ndarray) -> torch.Tensor:
    """As a part lies in a room: bytes seen as some dtype."""
    return (
        torch.from_numpy(words.copy())
        .view(torch.uint8)
        .view({1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[words.itemsize])
    )


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.5, 1.0])
def test_device_and_host_agree(width, share):
    old, new = states(width, share)
    cell = Cell(7, 3, 1_000_003, WORDS, width, 0)
    before = digest(old, cell)
    found = encode_on_device(cell, tensor(old), tensor(new), before)
    expected = encode(cell, old, new, before=before)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.after, found.changed, found.cell, found.before) == (digest(new, cell), expected.changed, 7, before)
    patch = decode(cell, found.codec, found.payload, old, found.before, found.after)
    target = old.copy()
    target[slice(None) if patch.positions is None else patch.positions] = patch.words
    assert (target == new).all()
    assert len(found.payload) <= len(expected.payload)
    assert found.codec == (FLAT if share <= 0.01 else expected.codec)


def test_nans_and_zeros_are_bits():
    """-0.0 equals 0.0 and NaN differs from itself, as numbers; here neither is so."""
    old = torch.tensor([0.0, float("nan"), 1.0] * 100, dtype=torch.bfloat16)
    new = old.clone()
    new[0] = -0.0
    cell = Cell(0, 0, 0, 300, 2, 0)
    before = digest(old.view(torch.int16).numpy().view(np.uint16), cell)
    found = encode_on_device(cell, old, new, before)
    assert found is not None
    assert found.changed == 1


def test_where_much_changes_the_smaller_codec_is_taken():
    draw = np.random.default_rng(1)
    old = draw.integers(0, 4, WORDS).astype(np.uint16)
    new = draw.integers(0, 4, WORDS).astype(np.uint16)
    cell = Cell(0, 0, 0, WORDS, 2, 0)
    found = encode_on_device(cell, tensor(old), tensor(new), digest(old, cell))
    assert found is not None
    assert found.codec == DENSE
