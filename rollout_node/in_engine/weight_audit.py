"""Digests of the live weights, read in place and summed in checkpoint order (docs/formats/delta-format.md, section 2).

Guarantee: there is one digest per block, and each element of this rank counts once. Different ranks' blocks of the same
box (replicated shards) give equal entries, so the sum over ranks drops duplicates. Tensors whose loader transforms
values have no bits of their own in the engine. For these, a rank reports whether the model's own loader, given the
shadow's values, would leave the weights unchanged, and the digest of these values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Map
from typing import Any

import numpy as np
import torch

from p2pcast.codec.digest import MASK, digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell, Layout
from p2pcast.device import digest_box, digest_row, to_int
from p2pcast.ground import limits
from rollout_node.in_engine.loader_recording import TORCH_DTYPES, Storages
from rollout_node.in_engine.loader_rehearsal import WORDS, LoaderVerdict, rehearse
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.weight_mapping import Mapping, StridedBlock

_CHUNK_WORDS = limits.INSTALL_CHUNK_BYTES // 40
"""Words per part on a device: position, weight and their intermediate values take 8 bytes each."""

Entry = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""Number of the tensor; start, shape and strides of the box; digest. A negative start is a LoaderVerdict on the whole
tensor.
"""


def digests(
    layout: Layout, mapping: Mapping, storages: Storages, cancelled: Callable[[], bool] = lambda: False
) -> list[Entry]:
    """Return one entry per block; of blocks with the same box, only the first. Tensors that only the loader can install
    are left out. A tensor with a twin uses the twin's blocks.
    """
    entries: list[Entry] = []
    of_twins = {number: mapping.blocks[twin] for number, twin in mapping.twins.items() if twin in mapping.blocks}
    for number, blocks in (of_twins | mapping.blocks).items():
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for block in blocks:
            if cancelled():
                return entries
            if (block.start, block.shape) not in seen:
                seen.add((block.start, block.shape))
                value = _digest(number, block, storages.table[block.storage].words)
                entries.append((number, block.start, block.shape, block.from_stride, value))
    return entries


def rehearsals(
    model: Any,
    shadow: ShadowReader,
    layout: Layout,
    mapping: Mapping,
    storages: Storages,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Entry]:
    """Return an entry for each tensor that only the loader can install and that this rank uses.

    If the shadow moves on meanwhile, the digest shows it. Memory: one tensor.
    """
    entries: list[Entry] = []
    loaded_as = {number: twin for number, twin in mapping.twins.items() if twin in mapping.reload}
    for number in sorted({*mapping.reload, *loaded_as}):
        tensor, name = layout.tensors[number], layout.tensors[loaded_as.get(number, number)].name
        if cancelled():
            return entries
        if tensor.dtype not in TORCH_DTYPES:
            continue
        values = shadow.tensor(number).clone()
        words = values.reshape(-1).view(WORDS[tensor.word_bytes]).numpy().view(word_dtype(tensor.word_bytes))
        verdict, _ = rehearse(model, storages.owns, name, values)
        if verdict is not LoaderVerdict.UNTOUCHED:
            seen = digest(words, Cell(0, number, 0, len(words), tensor.word_bytes, 0))
            entries.append((number, int(verdict), (), (), seen))
    return entries


def _digest(number: int, block: StridedBlock, words: torch.Tensor) -> int:
    return (digest_on_host if words.device.type == "cpu" else digest_in_place)(number, block, words)


def digest_in_place(number: int, block: StridedBlock, words: torch.Tensor) -> int:
    """The block's digest, computed on its device; only the result leaves the device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    with torch.inference_mode():
        for part in block.split(_CHUNK_WORDS):
            box = words.as_strided(part.shape, part.to_stride, part.at)
            if part.from_stride == (1,):
                total = total + digest_row(box.contiguous(), part.start, number)
            else:
                total = total + digest_box(box, part.start, part.from_stride, number)
    return to_int(total)


def digest_on_host(number: int, block: StridedBlock, words: torch.Tensor) -> int:
    """The block's digest, computed by the compiled kernels in host memory."""
    total = 0
    width = words.element_size()
    unsigned = word_dtype(width)
    for part in block.split(limits.INSTALL_CHUNK_BYTES // width):
        with torch.inference_mode():
            row = (
                words.as_strided(part.shape, part.to_stride, part.at)
                .contiguous()
                .cpu()
                .reshape(-1)
                .numpy()
                .view(unsigned)
            )
        if part.shape and part.from_stride[-1] == 1:
            at = 0
            for start, length in part.runs():
                total += digest(row[at : at + length], Cell(0, number, start, length, width, 0))
                at += length
        else:
            starts = np.fromiter((start for start, _ in part.runs()), np.int64, part.elements)
            base = int(starts[0])
            positions = (starts - base).astype(np.uint32)
            total += digest_change(positions, np.zeros_like(row), row, Cell(0, number, base, len(row), width, 0))
    return total & MASK


def compare(layout: Layout, entries: Iterable[Any], expected: Map[int, int]) -> tuple[list[str], list[str]]:
    """Return the names of tensors whose live digest differs, and of tensors without a verdict.

    A tensor has no verdict if it is not covered completely, its loader's writes cannot be judged, or the shadow has
    moved on. ``entries`` are those of all ranks, as received over the socket; ``expected``: digests by tensor number.
    """
    sums: dict[int, int] = {}
    counts: dict[int, int] = {}
    verdicts: dict[int, set[int]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    torn: set[int] = set()
    for number, start, shape, stride, value in entries:
        if start < 0:
            verdicts.setdefault(number, set()).add(start if value == expected.get(number) else LoaderVerdict.UNKNOWN)
            continue
        box = (number, start, tuple(shape), tuple(stride))
        if box in seen:  # a replicated shard, which counts once and must agree
            if seen[box] != value:
                torn.add(number)
            continue
        seen[box] = value
        sums[number] = (sums.get(number, 0) + value) & MASK
        counts[number] = counts.get(number, 0) + int(np.prod(shape, dtype=np.int64))
    wrong: list[str] = []
    unknown: list[str] = []
    for number, tensor in enumerate(layout.tensors):
        whole = counts.get(number, 0) == tensor.words
        differs = whole and sums.get(number, 0) != expected.get(number, 0)
        found = verdicts.get(number, set())
        if number in torn or differs or LoaderVerdict.DIFFERS in found:
            wrong.append(tensor.name)
        elif not whole and (number in counts or found != {LoaderVerdict.EQUAL}):
            unknown.append(tensor.name)
    return wrong, unknown
