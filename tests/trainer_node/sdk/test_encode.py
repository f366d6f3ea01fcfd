"""Coding with torch's operations: the same bytes as the host's coder makes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from p2pcast.codec.cell import CONTEXT, DENSE, FLAT, decode, digest
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.encode_cell import encode_as_chosen
from p2pcast.codec.layout import Cell, Tensor
from tests.support.tensor_device import DEVICE
from trainer_node.sdk.encode import ComparedRooms, codec_of, encode_on_device
from trainer_node.sdk.snapshot import Rooms, slots_for
from trainer_node.sdk.tensors import TORCH_DTYPES

pytestmark = pytest.mark.device

WORDS = 50_000


def states(width: int, share: float, seed: int = 0, words: int = WORDS) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    old = np.frombuffer(draw.bytes(words * width), word_dtype(width)).copy()
    new = old.copy()
    chosen = draw.random(words) < share
    new[chosen] += draw.integers(1, 120, chosen.sum()).astype(new.dtype)
    return old, new


def tensor(words: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As a part lies in a room: bytes seen as some dtype."""
    kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    return torch.from_numpy(words.copy()).view(torch.uint8).view(dtype or kinds[words.itemsize]).to(DEVICE)


def check(
    cell: Cell, old: np.ndarray, new: np.ndarray, dtype: torch.dtype | None = None, codec: str = "auto"
) -> int | None:
    """The codec."""
    before = digest(old, cell)
    found = encode_on_device(cell, tensor(old, dtype), tensor(new, dtype), before, codec)
    assert found == encode_as_chosen(cell, old, new, before, Choice(codec))
    if found is None:
        assert (old == new).all()
        return None
    assert found.after == digest(new, cell)
    patch = decode(cell, found.codec, found.payload, old, found.before, found.after)
    target = old.copy()
    target[slice(None) if patch.positions is None else patch.positions] = patch.words
    assert (target == new).all()
    return found.codec


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.5, 1.0])
def test_device_and_host_agree(width, share):
    old, new = states(width, share)
    codec = check(Cell(7, 3, 1_000_003, WORDS, width, 0), old, new)
    assert codec == (FLAT if share == 0.01 else codec)
    codec = check(Cell(7, 3, 1_000_003, WORDS, width, 0, 500), old, new, codec="context")
    assert codec == (CONTEXT if share == 0.0001 or (share == 0.01 and width > 1) else codec)


@pytest.mark.parametrize("words", [1, 2, 15, 16, 17, 1023, 4097])
def test_odd_sizes(words):
    for width in (1, 2, 4, 8):
        for share in (0.01, 1.0):
            old, new = states(width, share, words, words)
            for codec in ("auto", "context"):
                check(Cell(0, 1, 3, words, width, 0), old, new, codec=codec)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype(name):
    dtype = TORCH_DTYPES[name]
    whole = Tensor("t", name, (3000,))
    old, new = states(whole.word_bytes, 0.004, 1, whole.words)
    if dtype is torch.bool:  # not every byte is a bool
        old, new = old & 1, (old & 1) ^ (old != new)
    seen = torch.float32 if dtype is torch.complex64 else dtype
    for codec in ("auto", "context"):
        check(Cell(0, 0, 0, whole.words, whole.word_bytes, 0, 30), old, new, seen, codec)


def test_nans_and_zeros_are_bits():
    """As numbers, -0.0 equals 0.0 and NaN differs from NaN; as bits, -0.0 differs from 0.0 and NaN equals NaN."""
    old = torch.tensor([0.0, float("nan"), 1.0] * 100, dtype=torch.bfloat16, device=DEVICE)
    new = old.clone()
    new[0] = -0.0
    cell = Cell(0, 0, 0, 300, 2, 0)
    before = digest(old.view(torch.int16).cpu().numpy().view(np.uint16), cell)
    found = encode_on_device(cell, old, new, before)
    assert found is not None
    assert found.changed == 1


def test_where_much_changes_the_smaller_codec_is_taken():
    draw = np.random.default_rng(1)
    old = draw.integers(0, 4, WORDS).astype(np.uint16)
    new = draw.integers(0, 4, WORDS).astype(np.uint16)
    assert check(Cell(0, 0, 0, WORDS, 2, 0), old, new) == DENSE


def test_whole_cells_alone_are_coded_in_context():
    cell = Cell(0, 0, 0, 100, 2, 0)
    assert codec_of("context", cell, cell) == "context"
    assert codec_of("context", Cell(0, 0, 0, 99, 2, 0), cell) == "auto"
    assert {codec_of(told, cell, cell) for told in ("auto", "flat", "dense", "a later one")} == {"auto"}


@pytest.mark.parametrize("codec", ["auto", "context"])
@pytest.mark.parametrize("run_bytes", [1, 10_000, 1 << 20])
def test_parts_compared_together_match_parts_compared_alone(run_bytes, codec):
    """Odd sizes leave room between parts, in which anything may stand; one part changes all over, one not at all."""
    draw = np.random.default_rng(2)
    kinds = [(2, torch.bfloat16), (2, torch.float16), (4, torch.float32), (1, torch.float8_e4m3fn), (8, torch.int64)]
    sizes = [(int(draw.integers(1, 3000)), *kinds[k // 5]) for k in range(25)]
    slots, segments = slots_for(sizes)
    cells = [Cell(k, k, 7 * k, words, width, 0) for k, (words, width, _) in enumerate(sizes)]
    shares = [0.0 if k % 5 == 1 else 1.0 if k == 7 else 0.01 for k in range(25)]
    pairs = [states(width, shares[k], k, words) for k, (words, width, _) in enumerate(sizes)]
    rooms = Rooms(slots, segments, DEVICE, pinned=False)
    for side in (0, 1):
        rooms.next._segments[0].random_()
        for slot, pair in zip(slots, pairs, strict=True):
            rooms.next.tensor(slot).view(torch.uint8).copy_(torch.from_numpy(pair[side].view(np.uint8)))
        if not side:
            rooms.keep()
    assert rooms.previous is not None
    compared = ComparedRooms(slots, rooms.previous, rooms.next, run_bytes=run_bytes)
    before = [digest(old, cell) for cell, (old, _) in zip(cells, pairs, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compared.encode, cells, range(25), before, [codec] * 25))
    rows = zip(cells, pairs, before, strict=True)
    assert found == [encode_as_chosen(cell, old, new, held, Choice(codec)) for cell, (old, new), held in rows]
    assert sum(one is None for one in found) >= 5
