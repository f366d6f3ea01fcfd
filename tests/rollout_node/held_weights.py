"""A shadow that holds drawn weights, and their installation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow

LAYOUT = Layout(
    [Tensor("a.weight", "BF16", (300, 7)), Tensor("b", "F32", (5,)), Tensor("c", "U8", (3,))], cell_words=512
)


def small_files(version: Version) -> dict[str, bytes]:
    return {"config.json": b"{}", "tokenizer/vocab.txt": str(version.branch).encode()}


def state(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(LAYOUT.nbytes)


def hold(shadow: Shadow, version: Version, seed: int) -> Path:
    data = state(seed)
    shadow.fill(version, lambda c: np.frombuffer(data, word_dtype(c.word_bytes), c.words, c.offset))
    return shadow.path


async def install(installer, shadow: Shadow, version: Version, seed: int):
    await installer.stage(version, hold(shadow, version, seed))
    return await installer.commit(version)


def check(folder: Path, version: Version, seed: int) -> None:
    """The folder is exactly this version, and an ordinary checkpoint."""
    assert (folder / "STABLE").read_text() == f"{version}\n"
    found = Checkpoint.open(folder)
    words = b"".join(found.words(c).tobytes() for c in LAYOUT.cells)
    assert found.layout(cell_words=512) == LAYOUT
    assert words == state(seed)
    assert found.small_files() == small_files(version)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}
