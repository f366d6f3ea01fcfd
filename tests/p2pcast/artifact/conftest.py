"""A run's key, a small layout, and artifacts of random cells."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import blake3
import pytest

from p2pcast.artifact import Open, Packer, RunKey, run_id
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version


class Made(NamedTuple):
    key: RunKey
    layout: Layout
    open: bytes
    batches: list[bytes]
    manifest: bytes
    log: bytes
    cells: list[int]


def _make(seed: int, *, cells: int = 30, greedy: bool = True, kind: str = "delta", files: int = 2) -> Made:
    """``greedy``: batches are taken after every cell, as a live sender does; else all at the seal."""
    draw = random.Random(seed)
    key = RunKey(bytes([7]) * 32)
    layout = Layout([Tensor("a", "BF16", (40, 100)), Tensor("b", "F32", ())], cell_words=100)
    base = Version(0, 1) if kind == "delta" else None
    record = Open(draw.randbytes(16), base, kind, layout.layout_id, 1024, run_id(key.public), Version(0, 2))
    packer = Packer(key, record, layout)
    log = b""
    batches: list[bytes] = []
    chosen = list(range(len(layout.cells))) if kind == "anchor" else draw.sample(range(len(layout.cells)), cells)
    state = 0
    for cell in chosen:
        size = layout.cells[cell].nbytes if kind == "anchor" else draw.choice([1, 30, draw.randrange(1, 450)])
        size = min(size, 2 * layout.cells[cell].nbytes + 256)
        payload = draw.randbytes(size)
        log += payload
        after = draw.getrandbits(64)
        state += after
        codec, before = (1, 0) if kind == "anchor" else (3, draw.getrandbits(64))
        packer.add_cell(cell, codec, payload, before, after)
        while greedy and (batch := packer.take_batch()) is not None:
            batches.append(batch)
    for number in range(files):
        contents = draw.randbytes(draw.choice([0, 10, 3000]))
        digest = blake3.blake3(contents).digest()
        if number % 2 and kind == "delta":
            packer.add_file(f"f{number}", None, len(contents), digest)
        else:
            packer.add_file(f"sub/f{number}", contents, len(contents), digest)
            log += contents
    *rest, manifest = packer.seal(state % 2**64)
    assert packer.log_bytes == len(log)
    return Made(key, layout, packer.open_signed, batches + rest, manifest, log, chosen)


@pytest.fixture(scope="session")
def make_artifact() -> Callable[..., Made]:
    return _make
