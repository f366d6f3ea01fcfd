"""Digests of the live weights, read in place and summed in checkpoint order (docs/delta-format.md, section 2).

Promise: one digest a block, each element of this rank counted once; ranks' blocks that cover the same box (replicated
shards) are the same entry, so whoever adds up the ranks drops duplicates and nothing is counted twice. Tensors whose
loader transforms values have no bits of their own in the engine: for those a rank tells whether the model's own loader,
given the shadow's values, would leave the weights as they are, and the digest of the values that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Map
from typing import Any

import numpy as np
import torch

from p2pcast import limits
from p2pcast.codec.digest import MASK, digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell, Layout
from p2pcast.device import digest_box, digest_row, to_int
from rollout_node.vllm_plugin.mapping import Block, Mapping
from rollout_node.vllm_plugin.recording import TORCH_DTYPES, Storages
from rollout_node.vllm_plugin.rehearsal import WORDS, Verdict, rehearse
from rollout_node.vllm_plugin.shadow_reader import ShadowReader

_CHUNK_WORDS = limits.INSTALL_CHUNK_BYTES // 40
"""Words in a part on a device: a place, its weight and what they are made from take 8 bytes each."""

Entry = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""Number of the tensor, start, shape and strides of the box, digest. A negative start is a Verdict, about the whole tensor."""


def digests(layout: Layout, mapping: Mapping, storages: Storages, cancelled: Callable[[], bool] = lambda: False) -> list[Entry]:
    """An entry a block; of blocks with the same box, the first. Tensors that only reload are left out."""
    entries: list[Entry] = []
    for number, blocks in mapping.blocks.items():
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
    """An entry for each tensor that only reloads and that this rank uses. The shadow may move on meanwhile; then the digest
    tells. Memory: one tensor."""
    entries: list[Entry] = []
    for number in sorted(mapping.reload):
        tensor = layout.tensors[number]
        if cancelled():
            return entries
        if tensor.dtype not in TORCH_DTYPES:
            continue
        values = shadow.tensor(number).clone()
        words = values.reshape(-1).view(WORDS[tensor.word_bytes]).numpy().view(word_dtype(tensor.word_bytes))
        verdict, _ = rehearse(model, storages.owns, tensor.name, values)
        if verdict is not Verdict.UNTOUCHED:
            seen = digest(words, Cell(0, number, 0, len(words), tensor.word_bytes, 0))
            entries.append((number, int(verdict), (), (), seen))
    return entries


def _digest(number: int, block: Block, words: torch.Tensor) -> int:
    return (digest_on_host if words.device.type == "cpu" else digest_in_place)(number, block, words)


def digest_in_place(number: int, block: Block, words: torch.Tensor) -> int:
    """The block's digest, taken where it lies; one number leaves the device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    with torch.inference_mode():
        for part in block.split(_CHUNK_WORDS):
            box = words.as_strided(part.shape, part.to_stride, part.at)
            if part.from_stride == (1,):
                total = total + digest_row(box.contiguous(), part.start, number)
            else:
                total = total + digest_box(box, part.start, part.from_stride, number)
    return to_int(total)


def digest_on_host(number: int, block: Block, words: torch.Tensor) -> int:
    """The same by the compiled kernels, in the host's memory."""
    total = 0
    width = words.element_size()
    unsigned = word_dtype(width)
    for part in block.split(limits.INSTALL_CHUNK_BYTES // width):
        with torch.inference_mode():
            row = words.as_strided(part.shape, part.to_stride, part.at).contiguous().cpu().reshape(-1).numpy().view(unsigned)
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
    """Names of the tensors whose live digest differs, and of those that can't be told: not wholly covered, or reloaded by a
    loader that can't be followed, or from a shadow that has moved on.

    ``entries`` are all ranks' together, as they came over the socket; ``expected`` the digest of each tensor by number.
    """
    sums: dict[int, int] = {}
    counts: dict[int, int] = {}
    verdicts: dict[int, set[int]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    torn: set[int] = set()
    for number, start, shape, stride, value in entries:
        if start < 0:
            verdicts.setdefault(number, set()).add(start if value == expected.get(number) else Verdict.UNKNOWN)
            continue
        box = (number, start, tuple(shape), tuple(stride))
        if box in seen:  # a replicated shard: counted once, but it has to agree
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
        told = verdicts.get(number, set())
        if number in torn or differs or Verdict.DIFFERS in told:
            wrong.append(tensor.name)
        elif not whole and (number in counts or told != {Verdict.EQUAL}):
            unknown.append(tensor.name)
    return wrong, unknown
