"""A quantised copy of a shadow in memory, which follows the shadow from version to version.

Guarantee: after ``follow``, the copy is the quantised state of the shadow's version, bit for bit as if computed from
scratch. A patch in its folder leads there from the previous version. Only bands of rows with a changed weight are
quantised again. Synchronous; the caller must keep the shadow still meanwhile. After an error, the copy stays at its
version or the next ``follow`` rebuilds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import MASK, digest_change
from p2pcast.codec.layout import Cell
from p2pcast.ground import limits
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.ground.version import Version
from p2pcast.quantised.quantisation_kinds import QuantisationKind, Role
from p2pcast.quantised.quantised_checkpoint import quantised_bands, quantised_words
from p2pcast.quantised.quantised_layout import QuantisedLayout
from p2pcast.state.patch_file import PatchFile, PatchWriter
from p2pcast.state.shadow import Shadow, ShadowPhase

Words = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]
KEPT_PATCHES: Final = 16
"""Number of patches kept for a lagging engine; an engine further behind gets the whole state."""
_JOB_WEIGHTS: Final = limits.CELL_WORDS


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows ``first`` to ``last`` of a plain tensor, in whole bands."""

    source: int
    first: int
    last: int


class QuantisedShadow:
    """``folder``: the copy's folder. Raises IntegrityError (no tensor can be quantised), LocalError (no space)."""

    def __init__(self, plain: Shadow, folder: Path, kind: QuantisationKind) -> None:
        self.form = QuantisedLayout(plain.layout, kind)
        self.plain = plain
        self._first = _first_cells(plain)
        self.shadow = Shadow.create(folder, self.form.layout)
        self._own_first = _first_cells(self.shadow)
        self._bases: dict[Version, Version] = {}

    def close(self) -> None:
        self.shadow.close()

    @property
    def version(self) -> Version | None:
        return self.shadow.version if self.shadow.phase is ShadowPhase.CLEAN else None

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        """Like ``HeldShadow.patches``; ``to`` must be the copy's version."""
        chain: list[Path] = []
        at = to
        while base is not None and at != base:
            path, before = self.shadow.patch_path(at), self._bases.get(at)
            if before is None or not path.exists():
                return self.shadow.path
            chain.append(path)
            at = before
        return self.shadow.path if base is None else chain[::-1]

    def follow(self, changes: Sequence[Path] | None) -> None:
        """Move to the shadow's version. ``changes``: patches that lead there from the copy's version; None if there are
        none. Raises IntegrityError for values that cannot be quantised, LocalError if there is no space.
        """
        version, base = self.plain.version, self.version
        if changes is None or base is None:
            self._bases.clear()
            self.shadow.fill(version, lambda cell: quantised_words(self.form, cell, self._read), workers=cores())
            self.shadow.drop_patches(version)
            return
        path = self.shadow.patch_path(version)
        writer = PatchWriter(path, self.form.layout, base, version)
        try:
            state = self.shadow.state_digest
            for cell, positions, words in self._changed(changes):
                at = (positions - cell.start).astype(np.uint32)
                before = self.shadow.mark(cell.index)
                grown = digest_change(at, self.shadow.words(cell)[at], words, cell)
                writer.add(Patch(cell.index, at, words, before, (before + grown) & MASK, len(at)))
                state = (state + grown) & MASK
            writer.finish(state)
        except BaseException:
            writer.abandon()
            raise
        self.shadow.apply(path, workers=cores())
        self._bases[version] = base
        for old in self.shadow.patches[:-KEPT_PATCHES]:
            self.shadow.drop_patches(old)
            self._bases.pop(old, None)

    def _read(self, source: int, start: int, words: int) -> Words:
        return _joined(self.plain, self._first[source], start, words)

    # -- changes

    def _changed(self, changes: Sequence[Path]) -> Iterator[tuple[Cell, Positions, Words]]:
        """Yield the copy's cells that change, with positions in their tensor and the new words."""
        touched = self._touched([PatchFile.open(path, self.plain.layout) for path in changes])
        found: dict[int, list[tuple[Positions, Words]]] = {}
        jobs: list[_Job] = []
        for source, positions in touched.items():
            parts = self.form.parts[source]
            if Role.COPY in parts:
                found[parts[Role.COPY]] = [(positions, self._at(source, positions))]
            else:
                jobs += self._jobs(source, positions)
        for parts_of_job in ordered_map(self._requantised, jobs, workers=cores(), name="quantise"):
            for number, positions, words in parts_of_job:
                found.setdefault(number, []).append((positions, words))
        for cell in self.form.layout.cells:
            for_tensor = found.get(cell.tensor)
            if for_tensor is None:
                continue
            here = [self._inside(cell, positions, words) for positions, words in for_tensor]
            places = np.concatenate([p for p, _ in here])
            if len(places):
                yield cell, places, np.concatenate([w for _, w in here])

    def _touched(self, patches: Sequence[PatchFile]) -> dict[int, Positions]:
        """Return the changed positions in each plain tensor, in ascending order."""
        found: dict[int, list[Positions]] = {}
        for patch in patches:
            for change in patch.cells:
                cell = self.plain.layout.cells[change.cell]
                at = np.arange(cell.words, dtype=np.int64) if change.positions is None else change.positions
                found.setdefault(cell.tensor, []).append(at.astype(np.int64) + cell.start)
        return {source: np.unique(np.concatenate(parts)) for source, parts in found.items()}

    def _at(self, source: int, positions: Positions) -> Words:
        """Return a plain tensor's current words at ascending positions."""
        tensor = self.plain.layout.tensors[source]
        out: Words = np.empty(len(positions), f"<u{tensor.word_bytes}")
        for cell in self.plain.layout.cells[self._first[source] :]:
            if cell.tensor != source:
                break
            low, high = np.searchsorted(positions, (cell.start, cell.start + cell.words))
            out[low:high] = self.plain.words(cell)[positions[low:high] - cell.start]
        return out

    def _jobs(self, source: int, positions: Positions) -> list[_Job]:
        """Return runs of changed bands, with at most about ``_JOB_WEIGHTS`` weights each."""
        rows, columns = self.plain.layout.tensors[source].shape
        deep = self.form.kind.rows
        bands = np.unique(positions // (columns * deep))
        most = max(1, _JOB_WEIGHTS // (columns * deep))
        jobs: list[_Job] = []
        for run in np.split(bands, np.flatnonzero(np.diff(bands) != 1) + 1):
            for at in range(0, len(run), most):
                part = run[at : at + most]
                jobs.append(_Job(source, int(part[0]) * deep, min(rows, (int(part[-1]) + 1) * deep)))
        return jobs

    def _requantised(self, job: _Job) -> list[tuple[int, Positions, Words]]:
        """Return (tensor of the copy, positions, new words) for the words that differ in these rows."""
        form = self.form
        rows, columns = form.plain.tensors[job.source].shape
        codes, scales = next(quantised_bands(form, job.source, job.first, job.last, self._read, most=None))
        across = form.kind.scale_shape(rows, columns)[1]
        found = []
        for role, made, first in (
            (Role.CODES, codes, job.first * columns),
            (Role.SCALES, scales, job.first // form.kind.rows * across),
        ):
            number = form.parts[job.source][role]
            width = form.layout.tensors[number].word_bytes
            words = made.view(f"<u{width}")
            # A word of packed codes contains as many codes as it has bytes.
            first = first // width if role is Role.CODES else first
            differs = np.flatnonzero(words != self._held(number, first, len(words)))
            if len(differs):
                found.append((number, differs + first, words[differs]))
        return found

    def _held(self, number: int, start: int, count: int) -> Words:
        """Return the current words of a tensor of the copy."""
        return _joined(self.shadow, self._own_first[number], start, count)

    def _inside(self, cell: Cell, positions: Positions, words: Words) -> tuple[Positions, Words]:
        """Return the part of ascending changes that is in ``cell`` and differs from its words."""
        low, high = np.searchsorted(positions, (cell.start, cell.start + cell.words))
        positions, words = positions[low:high], words[low:high]
        differs = self.shadow.words(cell)[positions - cell.start] != words
        return positions[differs], words[differs]


def _joined(shadow: Shadow, index: int, start: int, count: int) -> Words:
    """Return ``count`` words of a tensor from ``start`` on. ``index``: the index of its first cell."""
    cells, end = shadow.layout.cells, start + count
    while cells[index].start + cells[index].words <= start:
        index += 1
    found: list[Words] = []
    while start < end:
        cell = cells[index]
        upto = min(end, cell.start + cell.words)
        found.append(shadow.words(cell)[start - cell.start : upto - cell.start])
        start, index = upto, index + 1
    return found[0] if len(found) == 1 else np.concatenate(found)


def _first_cells(shadow: Shadow) -> list[int]:
    """Return the index of each tensor's first cell."""
    first: dict[int, int] = {}
    for cell in shadow.layout.cells:
        first.setdefault(cell.tensor, cell.index)
    return [first.get(number, 0) for number in range(len(shadow.layout.tensors))]
