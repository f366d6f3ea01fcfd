"""The sparsity report of a delta file, with or without its base folder, or of two folders (``p2pcast inspect``).

Guarantee: every cell is examined once, on all cores. Weights are memory-mapped; memory is bounded by a few cells per
core and some kilobytes per tensor. With its base, a delta is decoded and both digests of each cell are verified; a
wrong base is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pcast import offline
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.checkpoint import Checkpoint
from p2pcast.codec import change_statistics
from p2pcast.codec.cell import CODEC_NAMES, FLAT, decode, digest
from p2pcast.codec.change_statistics import NO_THRESHOLD, WAYS, ChangeCounts
from p2pcast.codec.flat_codec import decode_flat
from p2pcast.codec.floats import FORMATS
from p2pcast.codec.layout import Cell, Layout, Tensor, cell_bytes
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.inspection.findings import findings

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CellCounts:
    """Counts of one cell. ``codec`` None: the cell is not in the delta."""

    cell: Cell
    codec: int | None
    nbytes: int
    counted: ChangeCounts


@dataclass(slots=True)
class TensorCounts:
    """Counts of one tensor, or of several."""

    nbytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    counted: ChangeCounts = field(default_factory=ChangeCounts)

    def add(self, nbytes: int, codecs: Counter[str], counted: ChangeCounts) -> None:
        self.nbytes += nbytes
        self.codecs.update(codecs)
        self.counted.add(counted)


def examine_delta(
    file: P2pdFile, base: Checkpoint | None, learning_rate: float | None, *, progress: Progress
) -> Iterator[CellCounts]:
    """Every cell of the layout, in order. Without ``base``, only what payloads state is counted.

    ``progress``: called with (bytes of this cell, bytes in all). Raises IntegrityError for a damaged delta or a wrong
    base.
    """
    layout = file.layout
    table = {placed.cell: placed for placed in file.assembly.directory}
    thresholds = _thresholds(learning_rate)

    def examine(cell: Cell) -> CellCounts:
        placed, dtype = table.get(cell.index), layout.tensors[cell.tensor].dtype
        progress(cell.nbytes, layout.nbytes)
        if base is None:
            if placed is None:
                return CellCounts(cell, None, 0, ChangeCounts(cell.words))
            payload = file.read_cell(placed)
            if placed.codec == FLAT:
                return CellCounts(
                    cell, FLAT, len(payload), change_statistics.count_steps(cell.words, decode_flat(payload, cell)[1])
                )
            counted = change_statistics.count_undecoded(
                cell.words, change_statistics.stated_changes(placed.codec, payload)
            )
            return CellCounts(cell, placed.codec, len(payload), counted)
        old = base.lent(cell)
        positions, new, nbytes = np.empty(0, np.uint32), old[:0], 0
        if placed is not None:
            payload, nbytes = file.read_cell(placed), placed.bytes
            patch = decode(cell, placed.codec, payload, old, placed.before, placed.after)
            new = patch.words
            if patch.positions is None:
                positions = np.flatnonzero(old != new).astype(np.uint32)
                new = new[positions]
            else:
                positions = patch.positions
        counted = change_statistics.count_cell(dtype, old, positions, new, thresholds.get(dtype, NO_THRESHOLD))
        return CellCounts(cell, None if placed is None else placed.codec, nbytes, counted)

    return ordered_map(examine, layout.cells, workers=cores(), name="inspect", nbytes=cell_bytes)


def compare_folders(
    old: Checkpoint, new: Checkpoint, layout: Layout, codec: str, learning_rate: float | None, *, progress: Progress
) -> Iterator[CellCounts]:
    """Every cell of the layout, which both folders share, in order; ``nbytes`` is the size in a delta of codec
    ``codec``.
    """
    thresholds = _thresholds(learning_rate)

    def examine(cell: Cell) -> CellCounts:
        was, now, dtype = old.lent(cell), new.lent(cell), layout.tensors[cell.tensor].dtype
        progress(cell.nbytes, layout.nbytes)
        coded = offline.encode_smallest(cell, was, now, digest(was, cell), codec)
        positions = np.empty(0, np.uint32) if coded is None else np.flatnonzero(was != now).astype(np.uint32)
        counted = change_statistics.count_cell(
            dtype, was, positions, now[positions], thresholds.get(dtype, NO_THRESHOLD)
        )
        return CellCounts(
            cell, None if coded is None else coded.codec, 0 if coded is None else len(coded.payload), counted
        )

    return ordered_map(examine, layout.cells, workers=cores(), name="inspect", nbytes=cell_bytes)


def _thresholds(learning_rate: float | None) -> dict[str, int]:
    """Return PULSE's threshold as magnitudes, by dtype; empty if there is no learning rate."""
    if learning_rate is None:
        return {}
    return {dtype: form.least_magnitude_of(form.visible_ratio * learning_rate) for dtype, form in FORMATS.items()}


def report(layout: Layout, cells: Iterable[CellCounts], learning_rate: float | None = None) -> dict[str, Any]:
    """A JSON document: ``total``, ``tensors`` by bytes, ``findings`` as sentences, and the learning rate of the
    thresholds.

    Without a learning rate, the mean update is used instead: the median over words of tensors' mean |new − old|,
    unchanged tensors left out.
    """
    rows = [TensorCounts() for _ in layout.tensors]
    for cell in cells:
        codecs = Counter() if cell.codec is None else Counter({CODEC_NAMES.get(cell.codec, str(cell.codec)): 1})
        rows[cell.cell.tensor].add(cell.nbytes, codecs, cell.counted)
    estimate = mean_update(rows)
    rate = estimate if learning_rate is None else learning_rate
    tensors = [
        _tensor(t, row, rate, exact=learning_rate is not None) for t, row in zip(layout.tensors, rows, strict=True)
    ]
    document = {
        "learning_rate": rate,
        "learning_rate_given": learning_rate is not None,
        "mean_update": estimate,
        "total": _total(rows, tensors),
        "tensors": sorted(tensors, key=lambda t: (-t["bytes"], t["name"])),
    }
    return {**document, "findings": findings(document)}


def mean_update(rows: Iterable[TensorCounts]) -> float | None:
    """Return the estimated |Δw| of an optimiser step.

    A value rounded to few bits moves rarely but far, so its mean move equals that of the unrounded value.
    """
    known = [
        (update, row.counted.words)
        for row in rows
        if row.counted.changed and (update := _mean(row.counted)) is not None
    ]
    half = sum(words for _, words in known) / 2
    for update, words in sorted(known):
        half -= words
        if half <= 0:
            return update or None
    return None


def _mean(counted: ChangeCounts) -> float | None:
    """Return the mean |new − old| if old values are known; None if it exceeds f64."""
    if counted.magnitudes is None or not counted.words:
        return None
    mean = counted.moved / counted.words * change_statistics.MOVE_UNIT
    return mean if math.isfinite(mean) else None


def _shares(row: TensorCounts) -> dict[str, Any]:
    counted = row.counted
    return {
        "words": counted.words,
        "changed": counted.changed,
        "exact": counted.exact,
        "share": counted.changed / counted.words if counted.words else 0.0,
        "bytes": row.nbytes,
        "codecs": dict(sorted(row.codecs.items())),
        "bits_per_change": 8 * row.nbytes / counted.changed if counted.changed and counted.exact else None,
        "steps_known": counted.counted,
        "ulps": _ulps(counted),
    }


def _ulps(counted: ChangeCounts) -> dict[str, dict[str, int]]:
    """Return the counts of words as range of ULPs → direction → words."""
    out = {}
    for b, ways in enumerate(counted.ulps.tolist()):
        if any(ways):
            name = str(1 << b) if b < 2 else f"{(1 << (b - 1)) + 1}-{1 << b}"
            out[name] = dict(zip(WAYS, ways, strict=True))
    return out


def _tensor(tensor: Tensor, row: TensorCounts, rate: float | None, *, exact: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), **_shares(row)}
    found, form = row.counted.magnitudes, FORMATS.get(tensor.dtype)
    if found is None or form is None:
        return {**out, "magnitudes": None}
    threshold = None if rate is None else form.visible_ratio * rate
    below_threshold = changed_below = None
    if threshold is not None:
        below_threshold = found.below_threshold if exact else change_statistics.below(form, found.words, threshold)
        changed_below = found.changed_below if exact else change_statistics.below(form, found.changed, threshold)
    return {
        **out,
        "magnitudes": {
            "mean_update": _mean(row.counted),
            "median": change_statistics.quantile(form, found.words, 0.5),
            "median_changed": change_statistics.quantile(form, found.changed, 0.5),
            "threshold": threshold,
            "under": below_threshold,
            "under_changed": changed_below,
            "by_exponent": {str(e): n for e, n in change_statistics.by_exponent(form, found.words).items()},
            "changed_by_exponent": {str(e): n for e, n in change_statistics.by_exponent(form, found.changed).items()},
        },
    }


def _total(rows: Iterable[TensorCounts], tensors: Iterable[dict[str, Any]]) -> dict[str, Any]:
    whole = TensorCounts()
    for row in rows:
        counted = row.counted
        # Magnitudes of several dtypes have no common keys, so the displayed exponents are summed.
        whole.add(
            row.nbytes,
            row.codecs,
            ChangeCounts(counted.words, counted.changed, counted.exact, counted.counted, counted.ulps),
        )
    found = [(t, t["magnitudes"]) for t in tensors if t["magnitudes"] is not None]
    if not found:
        return {**_shares(whole), "magnitudes": None}
    by_exponent: Counter[str] = Counter()
    changed_by_exponent: Counter[str] = Counter()
    for _, magnitudes in found:
        by_exponent.update(magnitudes["by_exponent"])
        changed_by_exponent.update(magnitudes["changed_by_exponent"])
    known = all(m["threshold"] is not None for _, m in found)
    return {
        **_shares(whole),
        "magnitudes": {
            "words": sum(t["words"] for t, _ in found),
            "changed": sum(t["changed"] for t, _ in found),
            "under": sum(m["under"] for _, m in found) if known else None,
            "under_changed": sum(m["under_changed"] for _, m in found) if known else None,
            "by_exponent": dict(sorted(by_exponent.items(), key=lambda item: int(item[0]))),
            "changed_by_exponent": dict(sorted(changed_by_exponent.items(), key=lambda item: int(item[0]))),
        },
    }
