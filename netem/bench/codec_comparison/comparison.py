"""``p2pcast bench codec``: size and speed of the delta codec beside the entropy, other systems' formats and a bare
scan, in one run.

Sizes are those of the states' own layout. Speeds are of one core. The states' words are tiled to a working set larger
than any cache and cut into ordinary cells. Scan, encode and decode take turns, and medians of CPU time are compared.
Encoding is a trainer's steady state: the old state's digests are known from the previous version, and the scan yields
the new ones. Decoding ends in a patch, with both digests verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from netem.bench.codec_comparison import pulse_format, sparrowrl_format, verl_format, xor_format
from netem.bench.codec_comparison.reference_scan import compact
from netem.bench.measuring import one_core, take_turns
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import CODEC_NAMES, Encoded, decode, digest, encode
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.ground.errors import UsageError

Words = npt.NDArray[Any]
State = dict[str, Words]
"""Tensor name → its words, 1-D and unsigned."""

LEARNING_RATES = (1e-6, 3e-6)
PAIRS = 2
"""Consecutive pairs of states for each learning rate."""
WORKING_SET_BYTES = 256 << 20
"""Bytes of the old state in speed measurements: many times any cache."""
REPEATS = 7
SLICE_WORDS = 1 << 20
"""Words of a tensor processed at a time."""
GROUP_WORDS = 1 << 25
"""Changed words passed to other systems' formats at a time: memory stays bounded, and longer streams would gain
nothing.
"""
_EXPONENT = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F32": (23, 0xFF), "F64": (52, 0x7FF)}
"""dtype → position of the exponent in a word: shift, mask."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """States in order, each to be coded against the previous one."""

    name: str
    layout: Layout
    states: list[State]

    @property
    def pairs(self) -> list[tuple[State, State]]:
        return list(zip(self.states, self.states[1:], strict=False))


def trained_datasets(learning_rates: Sequence[float] = LEARNING_RATES, pairs: int = PAIRS) -> Iterator[Dataset]:
    """Real weights under real AdamW steps. Needs torch and transformers. Raises LocalError."""
    from netem.fleet.adamw_steps import consecutive_states

    for rate in learning_rates:
        layout, states = consecutive_states(rate, pairs)
        yield Dataset(f"AdamW lr {rate:g}", layout, [dict(s) for s in states])


def folder_dataset(old: Path, new: Path) -> Dataset:
    """Two Hugging Face folders. Raises LocalError, IntegrityError, and UsageError for different tensors."""
    folders = [Checkpoint.open(old), Checkpoint.open(new)]
    layout = folders[0].layout()
    lines = layout.difference(folders[1].layout())
    if lines:
        raise UsageError(f"{old} and {new} have different tensors:\n" + "\n".join(lines[:20]))
    states = [{t.name: _words(folder, layout, number) for number, t in enumerate(layout.tensors)} for folder in folders]
    return Dataset(f"{old} → {new}", layout, states)


def _words(folder: Checkpoint, layout: Layout, number: int) -> Words:
    """All words of a tensor, as one cell of any size."""
    tensor = layout.tensors[number]
    if not tensor.words:
        return np.empty(0, dtype=word_dtype(tensor.word_bytes))
    return folder.words(Cell(number, number, 0, tensor.words, tensor.word_bytes, layout.offsets[number], 0))


def entropy_bits(tensor: Tensor, old: Words, new: Words) -> float:
    """Empirical entropy of "changed?" and of the step, both given the old value's exponent, within one tensor. The
    model's own description is not counted.
    """
    shift, mask = _EXPONENT.get(tensor.dtype, (0, 0))

    def exponent(words: Words) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = ((words >> words.dtype.type(shift)) & words.dtype.type(mask)).astype(np.int64)
        return found

    total = np.zeros(mask + 1)
    for at in range(0, old.size, SLICE_WORDS):
        total += np.bincount(exponent(old[at : at + SLICE_WORDS]), minlength=total.size)
    moved = np.flatnonzero(old != new)
    held = exponent(old[moved])
    changed = np.bincount(held, minlength=total.size).astype(np.float64)
    bits = _binary_bits(changed, total)
    pairs = np.stack([held.astype(np.uint64), (new[moved] - old[moved]).astype(np.uint64)])
    counts = np.unique(pairs, axis=1, return_counts=True)[1].astype(np.float64)
    per_exponent = changed[changed > 0]
    return bits + float((per_exponent * np.log2(per_exponent)).sum() - (counts * np.log2(counts)).sum())


def _binary_bits(ones: npt.NDArray[np.float64], total: npt.NDArray[np.float64]) -> float:
    bits = 0.0
    for part in (ones, total - ones):
        some = part > 0
        bits -= float((part[some] * np.log2(part[some] / total[some])).sum())
    return bits


def sizes(dataset: Dataset, codec: str) -> dict[str, Any]:
    """Bytes of all the dataset's deltas in each format. Every delta is also decoded and compared."""
    row = {
        "bytes": 0, "pulse_coo_bytes": 0, "pulse_flat_bytes": 0, "sparrowrl_bytes": 0, "xor_zstd_bytes": 0,
        "absolute_bytes": 0, "entropy_bytes": 0.0, "dense_bytes": 0, "changed": 0, "params": 0,
    }  # fmt: skip
    by_codec: dict[str, int] = {}
    tensors = dataset.layout.tensors
    for old, new in dataset.pairs:
        for cell in dataset.layout.cells:
            name = tensors[cell.tensor].name
            part = slice(cell.start, cell.start + cell.words)
            coded = encode(cell, old[name][part], new[name][part], codec=codec)
            if coded is not None:
                decode(cell, coded.codec, coded.payload, old[name][part], coded.before, coded.after)
                row["bytes"] += len(coded.payload)
                row["changed"] += coded.changed
                by_codec[CODEC_NAMES[coded.codec]] = by_codec.get(CODEC_NAMES[coded.codec], 0) + 1
        for tensor in tensors:
            row["entropy_bytes"] += entropy_bits(tensor, old[tensor.name], new[tensor.name]) / 8
        for key, nbytes in other_sizes(tensors, old, new).items():
            row[key] += nbytes
        row["dense_bytes"] += dataset.layout.nbytes
        row["params"] += dataset.layout.params
    row["entropy_bytes"] = round(row["entropy_bytes"])
    row["pulse_bytes"] = min(row["pulse_coo_bytes"], row["pulse_flat_bytes"])
    return {"dataset": dataset.name, "cells": by_codec, **row}


def other_sizes(tensors: Sequence[Tensor], old: State, new: State) -> dict[str, int]:
    """Bytes of one delta in other systems' formats."""
    out = dict.fromkeys(
        ("pulse_coo_bytes", "pulse_flat_bytes", "sparrowrl_bytes", "absolute_bytes", "xor_zstd_bytes"), 0
    )
    changes: pulse_format.Changes = []
    group: list[Tensor] = []

    def count() -> None:
        # For a packed tensor PULSE counts words: its shape is then one row.
        shapes = [t.shape if t.words == t.elements else (t.words,) for t in group]
        out["pulse_coo_bytes"] += len(pulse_format.encode_coo(changes, shapes))
        out["pulse_flat_bytes"] += len(pulse_format.encode_flat32(changes, [t.words for t in group]))
        out["sparrowrl_bytes"] += len(sparrowrl_format.encode(changes))
        out["absolute_bytes"] += len(verl_format.encode(changes))
        changes.clear()
        group.clear()

    for tensor in tensors:
        before, after = old[tensor.name], new[tensor.name]
        moved = np.flatnonzero(before != after)
        changes.append((moved, after[moved]))
        group.append(tensor)
        out["xor_zstd_bytes"] += len(xor_format.encode(before, after))
        if sum(len(positions) for positions, _ in changes) >= GROUP_WORDS:
            count()
    if group:
        count()
    return out


def tiled(dataset: Dataset, working_set_bytes: int) -> tuple[Words, Words]:
    """The first pair's words, of the width with the most bytes, repeated or evenly sampled to fill the working set."""
    old, new = dataset.pairs[0]
    by_width: dict[int, list[str]] = {}
    for name, words in old.items():
        by_width.setdefault(words.dtype.itemsize, []).append(name)
    if not by_width:
        raise UsageError(f"{dataset.name}: no words to measure")
    names = max(by_width.values(), key=lambda group: sum(old[n].nbytes for n in group))
    slices = [(n, at) for n in names for at in range(0, old[n].size, SLICE_WORDS)]
    wanted = -(-working_set_bytes // (SLICE_WORDS * old[names[0]].dtype.itemsize))
    if sum(old[n].nbytes for n in names) > working_set_bytes and len(slices) > wanted:
        slices = [slices[k] for k in np.linspace(0, len(slices) - 1, wanted).astype(int)]
    rows = [np.concatenate([state[n][at : at + SLICE_WORDS] for n, at in slices]) for state in (old, new)]
    copies = max(1, -(-working_set_bytes // rows[0].nbytes))
    return np.tile(rows[0], copies), np.tile(rows[1], copies)


@dataclass(frozen=True, slots=True)
class Work:
    """A cell as a trainer has it in its steady state, with the old words' digest known, and as a peer receives it."""

    cell: Cell
    old: Words
    new: Words
    before: int
    coded: Encoded | None


def work_of(old: Words, new: Words, codec: str) -> list[Work]:
    """The words in ordinary cells."""
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}[old.dtype.itemsize]
    work = []
    for cell in Layout([Tensor("tiled", dtype, (old.size,))]).cells:
        was, now = (words[cell.start : cell.start + cell.words] for words in (old, new))
        before = digest(was, cell)
        work.append(Work(cell, was, now, before, encode(cell, was, now, before=before, codec=codec)))
    return work


def encode_part(part: Work, codec: str) -> None:
    encode(part.cell, part.old, part.new, before=part.before, codec=codec)


def decode_part(part: Work) -> None:
    coded = part.coded
    if coded is not None:
        decode(part.cell, coded.codec, coded.payload, part.old, coded.before, coded.after)


def codec_works(work: Sequence[Work], codec: str) -> dict[str, Callable[[], None]]:
    """``encode`` and ``decode``: of all the work."""

    def encode_all() -> None:
        for part in work:
            encode_part(part, codec)

    def decode_all() -> None:
        for part in work:
            decode_part(part)

    return {"encode": encode_all, "decode": decode_all}


def speeds(
    dataset: Dataset, codec: str, *, working_set_bytes: int = WORKING_SET_BYTES, repeats: int = REPEATS
) -> dict[str, float]:
    """Median seconds of a bare scan, of encoding and of decoding the working set on one core, and its bytes."""
    work = work_of(*tiled(dataset, working_set_bytes), codec)
    positions = np.zeros(max(part.cell.words for part in work), dtype=np.uint32)

    def scan() -> None:
        for part in work:
            compact(part.old, part.new, positions)

    with one_core():
        taken = take_turns({"scan": scan, **codec_works(work, codec)}, repeats)
    times = {f"{name}_s": seconds for name, seconds in taken.items()}
    return {**times, "timed_bytes": float(sum(part.old.nbytes for part in work))}


def measure(
    dataset: Dataset, codec: str = "auto", *, working_set_bytes: int = WORKING_SET_BYTES, repeats: int = REPEATS
) -> dict[str, Any]:
    """One row of the report: sizes, seconds and their ratios."""
    timed = speeds(dataset, codec, working_set_bytes=working_set_bytes, repeats=repeats)
    return with_ratios({**sizes(dataset, codec), **timed})


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Add ratios of bytes and seconds; a ratio to zero is None."""

    def ratio(a: float, b: float) -> float | None:
        return round(a / b, 4) if b else None

    gigabytes = row["timed_bytes"] / 1e9
    return {
        **row,
        "ratio_to_pulse": ratio(row["bytes"], row["pulse_bytes"]),
        "ratio_to_entropy": ratio(row["bytes"], row["entropy_bytes"]),
        "ratio_to_sparrowrl": ratio(row["bytes"], row["sparrowrl_bytes"]),
        "ratio_to_xor_zstd": ratio(row["bytes"], row["xor_zstd_bytes"]),
        "ratio_to_absolute": ratio(row["bytes"], row["absolute_bytes"]),
        "ratio_to_dense": ratio(row["bytes"], row["dense_bytes"]),
        "encode_vs_scan": ratio(row["scan_s"], row["encode_s"]),
        "decode_vs_scan": ratio(row["scan_s"], row["decode_s"]),
        "scan_gb_s": ratio(gigabytes, row["scan_s"]),
        "encode_gb_s": ratio(gigabytes, row["encode_s"]),
        "decode_gb_s": ratio(gigabytes, row["decode_s"]),
    }


_ADDED = (
    "bytes",
    "pulse_bytes",
    "pulse_coo_bytes",
    "pulse_flat_bytes",
    "sparrowrl_bytes",
    "xor_zstd_bytes",
    "absolute_bytes",
    "entropy_bytes",
    "dense_bytes",
    "changed",
    "params",
    "scan_s",
    "encode_s",
    "decode_s",
    "timed_bytes",
)


def report(rows: Sequence[dict[str, Any]], codec: str) -> dict[str, Any]:
    """The document of ``bench codec --json``: sums over the rows, their ratios, and the rows."""
    total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in _ADDED}
    return {"codec": codec, **with_ratios(total), "rows": list(rows)}
