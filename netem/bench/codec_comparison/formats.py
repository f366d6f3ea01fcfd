"""Size and one core's speed of every format on the same words, in one run: the input of ``choice``'s predictions.

Sizes are those of the dataset's first pair, in its own layout; speeds are those of its words tiled to a working set,
each format in turn. The rivals' formats get their most favourable reading: the bench's compiled scan finds changes, no
hashes are taken, and decoding ends with positions and values. The formats of p2pcast take and verify digests, and
decode to a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from netem.bench.codec_comparison import pulse_format, sparrowrl_format, verl_format, xor_format
from netem.bench.codec_comparison.comparison import Dataset, codec_works, other_sizes, tiled, work_of
from netem.bench.codec_comparison.reference_scan import compact
from netem.bench.measuring import one_core, take_turns
from p2pcast.codec.cell import encode
from p2pcast.codec.codec_prediction import Cost

OURS = ("context", "flat", "dense")
WORKING_SET_BYTES = 64 << 20
"""Less than for the codec alone, since slow formats determine the time."""
REPEATS = 5
ROW_WORDS = 4096
"""Columns of the tiled words' 2-D view for PULSE's format: a model's hidden size."""

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DeltaFormat:
    """``overlaps``: the system encodes, sends and decodes at the same time. ``ours``: a p2pcast format, whose bytes are
    signed and verified.
    """

    name: str
    cost: Cost
    overlaps: bool = True
    ours: bool = False


@dataclass(frozen=True, slots=True)
class ComparedFormats:
    """Formats of one run. ``document``: the same for ``--json``, with ratios to the scan and to PULSE's format."""

    formats: list[DeltaFormat]
    document: dict[str, Any]


def measure_formats(
    dataset: Dataset, *, working_set_bytes: int = WORKING_SET_BYTES, repeats: int = REPEATS
) -> ComparedFormats:
    """Medians of CPU seconds, all works in turns. Raises UsageError for a dataset without words."""
    share = _shares(dataset)
    old, new = tiled(dataset, working_set_bytes)
    works = _other_works(old, new)
    for codec in OURS:
        found = codec_works(work_of(old, new, codec), codec)
        works |= {f"{codec} {name}": work for name, work in found.items()}
    with one_core():
        taken = take_turns(works, repeats)

    def cost(name: str) -> Cost:
        return Cost(old.nbytes / taken[f"{name} encode"], old.nbytes / taken[f"{name} decode"], share[name])

    formats = [DeltaFormat(name, cost(name), ours=True) for name in OURS]
    formats += [DeltaFormat("raw", cost("raw")), DeltaFormat("pulse", cost("pulse"), overlaps=False)]
    formats += [DeltaFormat("sparrowrl", cost("sparrowrl")), DeltaFormat("xor_zstd", cost("xor_zstd"), overlaps=False)]
    formats += [DeltaFormat("int32_bf16", cost("int32_bf16"), overlaps=False)]
    before, after = dataset.pairs[0]
    changed = sum(int(np.count_nonzero(words != after[name])) for name, words in before.items())
    document = {
        "dataset": dataset.name,
        "changed_share": changed / max(1, sum(words.size for words in before.values())),
        "timed_bytes": old.nbytes,
        "scan_gb_s": round(old.nbytes / taken["scan"] / 1e9, 4),
        "rows": [_row(f, taken, share["pulse"]) for f in formats],
    }
    return ComparedFormats(formats, document)


def _row(one: DeltaFormat, taken: dict[str, float], pulse_share: float) -> dict[str, Any]:
    cost = one.cost
    return {
        "format": one.name,
        "times_smaller": round(1 / cost.share, 4) if cost.share else None,
        "ratio_to_pulse": round(cost.share / pulse_share, 4) if pulse_share else None,
        "encode_gb_s": round(cost.encode_bytes_s / 1e9, 4),
        "decode_gb_s": round(cost.decode_bytes_s / 1e9, 4),
        "encode_vs_scan": round(taken["scan"] / taken[f"{one.name} encode"], 4),
        "decode_vs_scan": round(taken["scan"] / taken[f"{one.name} decode"], 4),
    }


def _shares(dataset: Dataset) -> dict[str, float]:
    """Payload bytes per byte of state."""
    old, new = dataset.pairs[0]
    tensors = dataset.layout.tensors
    sums = dict.fromkeys(OURS, 0)
    for cell in dataset.layout.cells:
        name = tensors[cell.tensor].name
        part = slice(cell.start, cell.start + cell.words)
        for codec in OURS:
            coded = encode(cell, old[name][part], new[name][part], before=0, codec=codec)
            sums[codec] += 0 if coded is None else len(coded.payload)
    other = other_sizes(tensors, old, new)
    sums["pulse"] = min(other["pulse_coo_bytes"], other["pulse_flat_bytes"])
    sums["sparrowrl"], sums["xor_zstd"] = other["sparrowrl_bytes"], other["xor_zstd_bytes"]
    sums["int32_bf16"] = other["absolute_bytes"]
    sums["raw"] = dataset.layout.nbytes
    return {name: nbytes / dataset.layout.nbytes for name, nbytes in sums.items()}


def _other_works(old: Words, new: Words) -> dict[str, Callable[[], Any]]:
    room = np.zeros(old.size, dtype=np.uint32)
    shapes = [(old.size // ROW_WORDS, ROW_WORDS) if old.size % ROW_WORDS == 0 else (old.size,)]

    def changes() -> pulse_format.Changes:
        moved = room[: compact(old, new, room)].astype(np.int64)
        return [(moved, new[moved])]

    copy = new.copy()
    coo, sparrow, xored = (
        pulse_format.encode_coo(changes(), shapes),
        sparrowrl_format.encode(changes()),
        xor_format.encode(old, new),
    )
    plain, counts = verl_format.encode(changes()), [len(positions) for positions, _ in changes()]
    return {
        "scan": lambda: compact(old, new, room),
        "raw encode": partial(np.copyto, copy, new),
        "raw decode": partial(np.copyto, copy, new),
        "pulse encode": lambda: pulse_format.encode_coo(changes(), shapes),
        "pulse decode": lambda: pulse_format.decode_coo(coo, shapes, [new.dtype]),
        "sparrowrl encode": lambda: sparrowrl_format.encode(changes()),
        "sparrowrl decode": lambda: sparrowrl_format.decode(sparrow, [new.dtype]),
        "xor_zstd encode": lambda: xor_format.encode(old, new),
        "xor_zstd decode": lambda: xor_format.decode(xored, old),
        "int32_bf16 encode": lambda: verl_format.encode(changes()),
        "int32_bf16 decode": lambda: verl_format.decode(plain, counts, [new.dtype]),
    }
