"""A layout of every word width, states, and deltas between them made by the real codec."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p2pcast.artifact.assembly import Placed
from p2pcast.codec.cell import encode
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.state.patch_builder import PatchBuilder
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.shadow import Shadow

ODD = Layout(
    [
        Tensor("embed", "BF16", (37, 11)),
        Tensor("norm", "F32", (53,)),
        Tensor("experts.é", "F8_E4M3", (3, 7, 9)),
        Tensor("rope", "F64", (2, 5)),
        Tensor("complex", "C64", (4,)),
        Tensor("packed", "F6_E2M3", (5,)),
        Tensor("scale", "F32", ()),
        Tensor("one", "BF16", (1, 1, 1)),
        Tensor("nothing", "BF16", (0, 8)),
    ],
    cell_words=64,
    cuts={2: (3, 50)},
)

BASE = Version(0, 0)


class World:
    """States are bytes in canonical order; ``words(state)(cell)`` are a cell's words."""

    layout = ODD

    def state(self, seed: int) -> bytes:
        return np.random.default_rng(seed).bytes(self.layout.nbytes)

    def step(self, state: bytes, seed: int, share: float = 0.05) -> bytes:
        """Another state: a share of the words moved by one, one cell rewritten."""
        rng = np.random.default_rng(seed)
        out = bytearray(state)
        rewritten = rng.choice(self.layout.cells).index
        for cell in self.layout.cells:
            words = np.frombuffer(out, word_dtype(cell.word_bytes), cell.words, cell.offset)
            if cell.index == rewritten:
                words[:] = np.frombuffer(rng.bytes(cell.nbytes), words.dtype)
            else:
                words[rng.random(cell.words) < share] += np.array(1, words.dtype)
        return bytes(out)

    def words(self, state: bytes):
        return lambda cell: np.frombuffer(state, word_dtype(cell.word_bytes), cell.words, cell.offset)

    def digest(self, state: bytes) -> int:
        return sum(digest(self.words(state)(c), c) for c in self.layout.cells) & MASK

    def delta(self, old: bytes, new: bytes, codec: str = "auto") -> list[tuple[Placed, bytes]]:
        out, offset = [], 0
        for cell in self.layout.cells:
            coded = encode(cell, self.words(old)(cell), self.words(new)(cell), codec=codec)
            if coded is not None:
                placed = Placed(cell.index, coded.codec, len(coded.payload), coded.before, coded.after, offset)
                out.append((placed, coded.payload))
                offset += placed.bytes
        return out

    def filled(self, folder: Path, state: bytes, version: Version = BASE) -> Shadow:
        shadow = Shadow.create(folder, self.layout)
        shadow.fill(version, self.words(state), self.digest(state))
        return shadow

    def stager(self, shadow: Shadow, version: Version, base: Version) -> PatchBuilder:
        writer = PatchWriter(shadow.patch_path(version), self.layout, base, version)
        return PatchBuilder(shadow, self.layout, version, base, writer)

    def stage(
        self,
        shadow: Shadow,
        old: bytes,
        new: bytes,
        version: Version,
        base: Version,
        codec: str = "auto",
        state: int | None = None,
    ) -> Path:
        stager = self.stager(shadow, version, base)
        for placed, payload in self.delta(old, new, codec):
            stager.decode(placed, payload)
        return stager.finish(self.digest(new) if state is None else state)

    def bytes_of(self, shadow: Shadow) -> bytes:
        return b"".join(shadow.words(c).tobytes() for c in self.layout.cells)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def world_class() -> type[World]:
    """For Hypothesis, which needs a new world for every example."""
    return World


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 1 MiB; needs root."""

    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        yield folder
    finally:
        # Unmount lazily: a test may leave maps, and the file system is freed with the last of them.
        subprocess.run(["umount", "-l", folder], check=True)
