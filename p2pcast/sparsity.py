"""The sparsity report: of a delta file, with or without the folder that it starts from, or of two folders (``p2pcast inspect``).

Promise: every cell is looked at once, on all cores; weights are mapped, and memory is bounded by a few cells a core and some kilobytes a tensor. With its
base a delta is decoded and both digests of each cell are verified; a wrong base is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pcast import offline
from p2pcast.artifact.p2pd import P2pdFile
from p2pcast.checkpoint import Checkpoint
from p2pcast.codec import sparsity
from p2pcast.codec.cell import CODEC_NAMES, FLAT, decode, digest
from p2pcast.codec.flat import decode_flat
from p2pcast.codec.floats import FORMATS
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.codec.sparsity import NO_THRESHOLD, WAYS, Counted
from p2pcast.findings import findings
from p2pcast.parallel import cores, ordered_map

Seen = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Look:
    """What was found of one cell. ``codec`` None: the cell is not in the delta."""

    cell: Cell
    codec: int | None
    nbytes: int
    counted: Counted


@dataclass(slots=True)
class Row:
    """A tensor's counts, or those of several."""

    nbytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    counted: Counted = field(default_factory=Counted)

    def add(self, nbytes: int, codecs: Counter[str], counted: Counted) -> None:
        self.nbytes += nbytes
        self.codecs.update(codecs)
        self.counted.add(counted)


def look_at_delta(file: P2pdFile, base: Checkpoint | None, learning_rate: float | None, *, seen: Seen) -> Iterator[Look]:
    """Every cell of the layout, in order. Without ``base``, what payloads say of themselves. Raises IntegrityError."""
    layout = file.layout
    table = {placed.cell: placed for placed in file.assembly.directory}
    thresholds = _thresholds(learning_rate)

    def look(cell: Cell) -> Look:
        placed, dtype = table.get(cell.index), layout.tensors[cell.tensor].dtype
        seen(cell.nbytes, layout.nbytes)
        if base is None:
            if placed is None:
                return Look(cell, None, 0, Counted(cell.words))
            payload = file.read_cell(placed)
            if placed.codec == FLAT:
                return Look(cell, FLAT, len(payload), sparsity.count_steps(cell.words, decode_flat(payload, cell)[1]))
            counted = sparsity.count_unread(cell.words, sparsity.stated_changes(placed.codec, payload))
            return Look(cell, placed.codec, len(payload), counted)
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
        counted = sparsity.count_cell(dtype, old, positions, new, thresholds.get(dtype, NO_THRESHOLD))
        return Look(cell, None if placed is None else placed.codec, nbytes, counted)

    return ordered_map(look, layout.cells, workers=cores(), name="inspect")


def look_at_folders(
    old: Checkpoint, new: Checkpoint, layout: Layout, codec: str, learning_rate: float | None, *, seen: Seen
) -> Iterator[Look]:
    """Every cell of the layout, which both folders have, in order; ``nbytes`` as a delta would take, coded in ``codec``."""
    thresholds = _thresholds(learning_rate)

    def look(cell: Cell) -> Look:
        was, now, dtype = old.lent(cell), new.lent(cell), layout.tensors[cell.tensor].dtype
        seen(cell.nbytes, layout.nbytes)
        coded = offline.code(cell, was, now, digest(was, cell), codec)
        positions = np.empty(0, np.uint32) if coded is None else np.flatnonzero(was != now).astype(np.uint32)
        counted = sparsity.count_cell(dtype, was, positions, now[positions], thresholds.get(dtype, NO_THRESHOLD))
        return Look(cell, None if coded is None else coded.codec, 0 if coded is None else len(coded.payload), counted)

    return ordered_map(look, layout.cells, workers=cores(), name="inspect")


def _thresholds(learning_rate: float | None) -> dict[str, int]:
    """PULSE's threshold as magnitudes; without a learning rate none."""
    if learning_rate is None:
        return {}
    return {dtype: form.least_from(form.survives * learning_rate) for dtype, form in FORMATS.items()}


def report(layout: Layout, looks: Iterable[Look], learning_rate: float | None = None) -> dict[str, Any]:
    """A JSON document: ``total``, ``tensors`` by bytes, ``findings`` in words, and the learning rate that thresholds are of.

    Without one, the mean update stands for it: the median over words of tensors' mean |new − old|, those that did not change left out.
    """
    rows = [Row() for _ in layout.tensors]
    for look in looks:
        codecs = Counter() if look.codec is None else Counter({CODEC_NAMES.get(look.codec, str(look.codec)): 1})
        rows[look.cell.tensor].add(look.nbytes, codecs, look.counted)
    estimate = mean_update(rows)
    rate = estimate if learning_rate is None else learning_rate
    tensors = [_tensor(t, row, rate, exact=learning_rate is not None) for t, row in zip(layout.tensors, rows, strict=True)]
    document = {
        "learning_rate": rate,
        "learning_rate_given": learning_rate is not None,
        "mean_update": estimate,
        "total": _total(rows, tensors),
        "tensors": sorted(tensors, key=lambda t: (-t["bytes"], t["name"])),
    }
    return {**document, "findings": findings(document)}


def mean_update(rows: Iterable[Row]) -> float | None:
    """About |Δw| of an optimiser step. Rounded to few bits, a value moves seldom but far, so that its mean move is that of the value before rounding."""
    known = [(update, row.counted.words) for row in rows if row.counted.changed and (update := _mean(row.counted)) is not None]
    half = sum(words for _, words in known) / 2
    for update, words in sorted(known):
        half -= words
        if half <= 0:
            return update or None
    return None


def _mean(counted: Counted) -> float | None:
    """Mean |new − old|, where values are known; None beyond f64."""
    if counted.magnitudes is None or not counted.words:
        return None
    mean = counted.moved / counted.words * sparsity.MOVE_UNIT
    return mean if math.isfinite(mean) else None


def _shares(row: Row) -> dict[str, Any]:
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


def _ulps(counted: Counted) -> dict[str, dict[str, int]]:
    """Range of ULPs → way → words."""
    out = {}
    for b, ways in enumerate(counted.ulps.tolist()):
        if any(ways):
            name = str(1 << b) if b < 2 else f"{(1 << (b - 1)) + 1}-{1 << b}"
            out[name] = dict(zip(WAYS, ways, strict=True))
    return out


def _tensor(tensor: Tensor, row: Row, rate: float | None, *, exact: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), **_shares(row)}
    found, form = row.counted.magnitudes, FORMATS.get(tensor.dtype)
    if found is None or form is None:
        return {**out, "magnitudes": None}
    threshold = None if rate is None else form.survives * rate
    under = under_changed = None
    if threshold is not None:
        under = found.under if exact else sparsity.below(form, found.every, threshold)
        under_changed = found.under_those if exact else sparsity.below(form, found.those, threshold)
    return {
        **out,
        "magnitudes": {
            "mean_update": _mean(row.counted),
            "median": sparsity.quantile(form, found.every, 0.5),
            "median_changed": sparsity.quantile(form, found.those, 0.5),
            "threshold": threshold,
            "under": under,
            "under_changed": under_changed,
            "by_exponent": {str(e): n for e, n in sparsity.by_exponent(form, found.every).items()},
            "changed_by_exponent": {str(e): n for e, n in sparsity.by_exponent(form, found.those).items()},
        },
    }


def _total(rows: Iterable[Row], tensors: Iterable[dict[str, Any]]) -> dict[str, Any]:
    whole = Row()
    for row in rows:
        counted = row.counted
        # Magnitudes of several dtypes have no common keys: they are summed as they are shown.
        whole.add(row.nbytes, row.codecs, Counted(counted.words, counted.changed, counted.exact, counted.counted, counted.ulps))
    found = [(t, t["magnitudes"]) for t in tensors if t["magnitudes"] is not None]
    if not found:
        return {**_shares(whole), "magnitudes": None}
    every: Counter[str] = Counter()
    those: Counter[str] = Counter()
    for _, magnitudes in found:
        every.update(magnitudes["by_exponent"])
        those.update(magnitudes["changed_by_exponent"])
    known = all(m["threshold"] is not None for _, m in found)
    return {
        **_shares(whole),
        "magnitudes": {
            "words": sum(t["words"] for t, _ in found),
            "changed": sum(t["changed"] for t, _ in found),
            "under": sum(m["under"] for _, m in found) if known else None,
            "under_changed": sum(m["under_changed"] for _, m in found) if known else None,
            "by_exponent": dict(sorted(every.items(), key=lambda item: int(item[0]))),
            "changed_by_exponent": dict(sorted(those.items(), key=lambda item: int(item[0]))),
        },
    }
