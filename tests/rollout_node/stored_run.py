"""A run to install: shadow, patches and versions on disk, as a peer stores them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.shadow import Shadow
from rollout_node.in_engine.install_frames import Descriptors


class Run:
    """Provider of an install socket: version 0.0 is filled from ``state`` bytes; ``step`` makes the next version."""

    def __init__(self, folder: Path, layout: Layout, state: np.ndarray) -> None:
        self.layout, self.folder = layout, folder
        self.shadow = Shadow.create(folder, layout)
        self.version = Version(0, 0)
        cells = layout.cells
        self.shadow.fill(self.version, lambda c: state[c.offset : c.offset + c.nbytes].view(word_dtype(c.word_bytes)))
        assert len(cells)
        self.chain: list[Version] = []
        self.reports: list[dict[str, Any]] = []
        self.serve: list[Path] | None = None
        self.schedules: dict[Version, bytes] = {}
        self.small: dict[str, bytes] = {}

    def step(self, seed: int, share: float = 0.02, bits: int = 0) -> Version:
        """The next version: ``share`` of the words of most cells change, XORed with ``bits`` or drawn at random."""
        rng = np.random.default_rng(seed)

        def change(old: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | None:
            if rng.random() < 0.1:
                return None
            n = max(1, int(len(old) * share))
            positions = np.sort(rng.choice(len(old), n, replace=False)).astype(np.uint32)
            new = old.copy()
            new[positions] ^= np.array(bits or 1, new.dtype) if bits else rng.integers(1, 4, n).astype(new.dtype)
            return new, positions, bool(rng.random() < 0.2)

        return self._advance(lambda _, old: change(old))

    def flip(self, *names: str) -> Version:
        """The next version: the lowest bit of each word of these tensors differs."""
        wanted = {self.layout.numbers[name] for name in names}

        def change(cell: Any, old: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | None:
            every = np.arange(len(old), dtype=np.uint32)
            return (old ^ np.array(1, old.dtype), every, False) if cell.tensor in wanted else None

        return self._advance(change)

    def _advance(self, change: Callable[[Any, np.ndarray], tuple[np.ndarray, np.ndarray, bool] | None]) -> Version:
        """``change``: of a cell and its words, the new words, the positions that differ, and whether the patch holds
        the whole cell.
        """
        base, self.version = self.version, Version(0, self.version.step + 1)
        path = self.shadow.patch_path(self.version)
        writer = PatchWriter(path, self.layout, base, self.version)
        state = self.shadow.state_digest
        for cell in self.layout.cells:
            old = self.shadow.words(cell).copy()
            if (changed := change(cell, old)) is None:
                continue
            new, positions, dense = changed
            before, after = digest(old, cell), digest(new, cell)
            values = new if dense else new[positions]
            writer.add(Patch(cell.index, None if dense else positions, values, before, after, len(positions)))
            state = (state + after - before) & MASK
        writer.finish(state)
        self.shadow.apply(path)
        self.chain.append(self.version)
        return self.version

    @property
    def digests(self) -> dict[int, int]:
        """Each tensor's digest, from the shadow's marks."""
        found: dict[int, int] = {}
        for cell in self.layout.cells:
            found[cell.tensor] = (found.get(cell.tensor, 0) + self.shadow.mark(cell.index)) & MASK
        return found

    def save(self, like: Path, to: Path) -> Path:
        """A Hugging Face folder of the current version."""
        shutil.copytree(like, to)
        shutil.copyfile(self.shadow.path, to / "model.safetensors")
        return to

    @property
    def files(self) -> Files:
        return Files(self)

    # the Provider

    def layout_document(self) -> bytes:
        return self.layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        if to != self.version:
            raise LocalError(f"{to} isn't staged")
        if self.serve is not None:
            return self.serve
        found = [self.shadow.patch_path(v) for v in self.chain if base is not None and base < v <= to]
        return found or self.shadow.path

    def schedule(self, version: Version) -> bytes | None:
        return self.schedules.get(version)

    def config(self, version: Version) -> bytes | None:
        return self.small.get("config.json")

    def small_files(self, version: Version) -> dict[str, bytes]:
        return self.small

    def report(self, report: Any) -> None:
        self.reports.append(dict(report))


class Files:
    """Passes a run's files without a socket."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def patches(self, base: Version | None, to: Version) -> Descriptors:
        found = self.run.patches(base, to)
        paths = [found] if isinstance(found, Path) else found
        return Descriptors(
            [os.open(p, os.O_RDONLY) for p in paths],
            isinstance(found, Path),
            self.run.schedule(to),
            self.run.config(to),
        )

    def adapter_configs(self, version: Version) -> dict[str, bytes]:
        return self.run.small


def state_of(folder: Path) -> tuple[Layout, np.ndarray]:
    """Layout and canonical state of a Hugging Face folder with one file."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = {n: e for n, e in json.loads(data[8 : 8 + size]).items() if n != "__metadata__"}
    layout = Layout([Tensor(n, e["dtype"], tuple(e["shape"])) for n, e in table.items()], cell_words=5000)
    spans = [table[t.name]["data_offsets"] for t in layout.tensors]
    return layout, np.frombuffer(b"".join(data[8 + size + a : 8 + size + b] for a, b in spans), np.uint8)
