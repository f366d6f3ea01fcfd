"""Decides which elements of the state this rank sends: each element of each tensor has exactly one owner.

Plain and replicated tensors are dealt cell by cell, in turn, to the ranks that hold them. Shards of rows (FSDP2) are
sent by their holders; with several replicas (HSDP, or adjacent meshes), the first replica sends. Tensors with any other
placement are gathered and then dealt. ``dealt`` is pure; ``holding`` asks torch for a tensor's placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from p2pcast.codec.join_parts import within
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError

MAX_PART_WORDS = limits.CELL_WORDS
"""Larger cells are sent in several parts, because a message carries at most 32 MiB."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a tensor on this rank. ``holders``: the ranks that have all of the tensor, if necessary once
    gathered. If each rank has its own rows, ``holders`` is empty, and this rank sends ``elements`` elements from
    ``first`` on.
    """

    holders: tuple[int, ...]
    first: int = 0
    elements: int = 0
    gather: bool = False


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Words of one cell that this rank sends. Fields:

    - ``cell``: the part in the form of a cell (same index, ``start`` in the tensor, ``words``), so that it can be
      encoded by itself.
    - ``at``: offset from the cell's start, in words.
    - ``source``: offset from the start of the rank's share of the tensor, in words.
    """

    cell: Cell
    at: int
    source: int


def holding(tensor: torch.Tensor | None, numbers: Sequence[int]) -> LocalShard:
    """The part of a tensor on this rank; ``tensor`` is None for a tensor that is whole on every rank. ``numbers``: the
    group's global ranks, in order. Raises UsageError if the tensor is also on ranks outside the group.
    """
    everybody = tuple(range(len(numbers)))
    if not isinstance(tensor, DTensor):
        return LocalShard(everybody)
    mesh, placements = tensor.device_mesh, tensor.placements
    members = {number: rank for rank, number in enumerate(numbers)}
    on_mesh = [int(number) for number in mesh.mesh.flatten().tolist()]
    if any(number not in members for number in on_mesh):
        raise UsageError(
            f"a tensor lies on ranks {on_mesh}, the publisher's group has ranks {list(numbers)}:"
            " give it the group of all"
        )
    holders = tuple(sorted(members[number] for number in on_mesh))
    if 0 not in holders:
        # One of several parts of a larger mesh: the first part has the same tensor, and sends it.
        return LocalShard(())
    if all(type(p) is Replicate for p in placements):
        return LocalShard(holders)
    if not all(type(p) is Replicate or (type(p) is Shard and p.dim == 0) for p in placements):
        return LocalShard(holders, gather=True)
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(type(p) is Replicate and at for p, at in zip(placements, coordinate, strict=True)):
        return LocalShard(())
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    row = tensor.shape[1:].numel()
    return LocalShard((), first=int(offset[0]) * row, elements=int(shape[0]) * row)


def dealt(layout: Layout, holdings: Sequence[LocalShard], rank: int) -> list[ShardPart]:
    """Return the parts that ``rank`` sends, in the order of cells. ``holdings``: for each tensor of the layout, by
    number, what this rank has of it.
    """
    out: list[ShardPart] = []
    for cell in layout.cells:
        held = holdings[cell.tensor]
        if held.holders:
            if held.holders[cell.index % len(held.holders)] == rank:
                out += _parts(cell, cell.start, cell.start + cell.words, 0)
            continue
        tensor = layout.tensors[cell.tensor]
        scale = tensor.words // tensor.elements
        begin, end = held.first * scale, (held.first + held.elements) * scale
        out += _parts(cell, max(begin, cell.start), min(end, cell.start + cell.words), begin)
    return out


def _parts(cell: Cell, begin: int, end: int, origin: int) -> list[ShardPart]:
    """Cut words ``begin`` to ``end`` of the tensor, all inside ``cell``, into parts. ``origin``: where the rank's own
    words begin in the tensor.
    """
    out: list[ShardPart] = []
    while begin < end:
        words = min(MAX_PART_WORDS, end - begin)
        at = begin - cell.start
        out.append(ShardPart(within(cell, at, words), at, begin - origin))
        begin += words
    return out
