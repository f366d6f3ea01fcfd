"""A version staged while the engine runs, and the switch to it.

Guarantee: staging reads the live weights and writes nothing. ``apply`` costs O(changed) and never rebinds storage;
``restore`` restores every bit that ``apply`` overwrote. Both read back what they write (``install_proof``). Host
memory: 8 bytes per changed bf16 value (where, new, old). Device memory: at most ``INSTALL_CHUNK_BYTES`` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.digest import MASK, digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.state.patch_file import PatchFile
from rollout_node.in_engine.install_proof import mark
from rollout_node.in_engine.loader_recording import Storages
from rollout_node.in_engine.weight_mapping import Mapping, StridedBlock

_CHUNK_VALUES = limits.INSTALL_CHUNK_BYTES // 32
"""Values per chunk, at 32 bytes each on the device.

There, torch widens positions to 8 bytes, twice while their mark is computed. Added to this are the 4 or 8 bytes sent,
and up to 8 bytes for the value.
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Values for one storage. ``where``: their distinct positions, in words."""

    storage: int
    where: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


@dataclass(slots=True)
class Staged:
    """``reload``: numbers of the changed tensors that only the model's own loader can install. ``mark``: mark of the
    new values and their positions.

    ``grown``: growth of each block's digest by the first patch, given the live values. ``expected``: growth of each
    mapped tensor's digest, as stated by the patch.
    """

    chunks: list[Chunk] = field(default_factory=list)
    reload: set[int] = field(default_factory=set)
    mark: int = 0
    grown: dict[tuple[int, StridedBlock], int] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    applied: int = 0

    @property
    def values(self) -> int:
        return sum(len(chunk.where) for chunk in self.chunks)

    def apply(self, storages: Storages) -> int:
        """Write the new values. Returns the mark of the values read back. After an error, ``restore`` undoes what was
        written.
        """
        found = 0
        with torch.inference_mode():
            for chunk in self.chunks[self.applied :]:
                self.applied += 1  # before the write, so that a failed chunk is restored too
                found += _write(storages.table[chunk.storage].words, chunk.where, chunk.new)
        return found & MASK

    def restore(self, storages: Storages) -> bool:
        """Write back the values that the applied chunks overwrote. Returns whether reading them back confirms it. A
        further call changes nothing.
        """
        there = True
        with torch.inference_mode():
            for chunk in reversed(self.chunks[: self.applied]):
                found = _write(storages.table[chunk.storage].words, chunk.where, chunk.old)
                there &= found == mark(chunk.where, chunk.old)
            self.applied = 0
        return there


def _write(words: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> int:
    """Write the values, and return the mark of the values read back."""
    where = where.to(words.device, non_blocking=True)
    words.index_put_((where,), values.to(words.device, non_blocking=True))
    return mark(where, words.index_select(0, where))


class Stager:
    """Collects located changes until a chunk is full."""

    def __init__(self, storages: Storages, staged: Staged) -> None:
        self._storages, self._staged = storages, staged
        self._rows: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._counts: dict[int, int] = {}

    def add(
        self, storage: int, where: npt.NDArray[np.int64], new: npt.NDArray[Any], *, drop_unchanged: bool
    ) -> npt.NDArray[Any]:
        """Add changes (storage positions, unsigned words), and return the live words at these positions.

        ``drop_unchanged`` drops changes equal to the live words, which are most of a dense cell. Only valid before any
        other change is staged.
        """
        words = self._storages.table[storage].words
        narrow = words.numel() <= np.iinfo(np.int32).max
        at = torch.from_numpy(where.astype(np.int32 if narrow else np.int64))
        values = torch.from_numpy(new.view(f"i{new.itemsize}" if new.itemsize > 1 else "u1").copy())
        with torch.inference_mode():
            old = torch.cat([words[part.to(words.device)].cpu() for part in at.split(_CHUNK_VALUES)] or [values[:0]])
        replaced: npt.NDArray[Any] = old.numpy().view(new.dtype)
        if drop_unchanged:
            differs = torch.from_numpy(np.flatnonzero(new != replaced))
            at, values, old = at[differs], values[differs], old[differs]
        self._rows.setdefault(storage, []).append((at, values, old))
        self._counts[storage] = self._counts.get(storage, 0) + len(at)
        if self._counts[storage] >= _CHUNK_VALUES:
            self._flush(storage)
        return replaced

    def flush(self) -> None:
        """Flush between two patches. A later one may overwrite the same values, so the two must never share a chunk."""
        for storage in sorted(self._rows):
            self._flush(storage)

    def _flush(self, storage: int) -> None:
        rows = self._rows.pop(storage)
        self._counts.pop(storage)
        where, new, old = (torch.cat([row[i] for row in rows]) for i in range(3))
        pinned = self._storages.table[storage].words.is_cuda
        for at in range(0, len(where), _CHUNK_VALUES):
            parts = [t[at : at + _CHUNK_VALUES] for t in (where, new, old)]
            self._staged.chunks.append(Chunk(storage, *(p.pin_memory() if pinned else p for p in parts)))
            self._staged.mark = (self._staged.mark + mark(parts[0], parts[1])) & MASK


def stage(
    patches: Sequence[PatchFile],
    layout: Layout,
    mapping: Mapping,
    storages: Storages,
    cancelled: Callable[[], bool] = lambda: False,
) -> Staged:
    """Stage a chain of patches. Reads live weights, so no version may be applied meanwhile.

    Raises IntegrityError if live values at changed positions are not those of the chain's base. This is checked for
    cells that are entirely on this rank.
    """
    staged = Staged()
    stager = Stager(storages, staged)
    for number, patch in enumerate(patches):
        for change in patch.cells:
            if cancelled():
                return staged
            cell = layout.cells[change.cell]
            if cell.tensor in mapping.reload:
                staged.reload.add(cell.tensor)
                continue
            positions = np.arange(cell.words, dtype=np.uint32) if change.positions is None else change.positions
            found, grown = 0, 0
            if number == 0:
                staged.expected[cell.tensor] = (
                    staged.expected.get(cell.tensor, 0) + change.after - change.before
                ) & MASK
            for block in mapping.blocks.get(cell.tensor, ()):
                if number == 0:
                    staged.grown.setdefault(
                        (cell.tensor, block), 0
                    )  # unchanged blocks too: together the blocks cover the tensor
                chosen, where = block.locate(positions, cell.start)
                if not len(where):
                    continue
                new = change.words[chosen]
                old = stager.add(block.storage, where, new, drop_unchanged=number == 0)
                found += len(where)
                more = digest_change(positions[chosen], old, new, cell)
                grown += more
                if number == 0:
                    staged.grown[cell.tensor, block] += more
            # Only the first patch applies to unpatched weights; a sharded cell is only partly on this rank.
            if number == 0 and found == len(positions) and (grown - change.after + change.before) & MASK:
                name = layout.tensors[cell.tensor].name
                raise IntegrityError(
                    f"{name}: the engine's live values are not those of {patch.base}; install the whole state"
                )
        stager.flush()
    return staged


def compile_digest_kernels(layout: Layout) -> None:
    """Compile the digest kernels before the first prepare, because this takes seconds without a cache."""
    for width in {tensor.word_bytes for tensor in layout.tensors}:
        word = np.zeros(1, word_dtype(width))
        cell = Cell(0, 0, 0, 1, width, 0)
        digest(word, cell)
        digest_change(np.zeros(1, np.uint32), word, word, cell)
