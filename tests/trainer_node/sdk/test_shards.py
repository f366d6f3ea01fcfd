"""Every element has one owner, however tensors are placed: properties of the dealing, and what is read off a
DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.codec.layout import Layout, Tensor
from trainer_node.sdk import shards
from trainer_node.sdk.shards import LocalShard, dealt, holding

RANKS = 4


def chunks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """(first row, rows) of each rank, as torch.chunk cuts: the last may have fewer, or none."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), max(0, min(size, rows - rank * size))) for rank in range(ranks)]


def covered(layout: Layout, holdings: Sequence[Sequence[LocalShard]]) -> list[np.ndarray]:
    """How many ranks send each word of each tensor. ``holdings[rank]``: by tensor."""
    counts = [np.zeros(t.words, int) for t in layout.tensors]
    for rank, held in enumerate(holdings):
        last = -1
        for part in dealt(layout, held, rank):
            cell = layout.cells[part.cell.index]
            assert part.cell.index >= last
            last = part.cell.index
            assert part.cell.tensor == cell.tensor
            assert part.cell.word_bytes == cell.word_bytes
            assert 0 < part.cell.words <= shards.MAX_PART_WORDS
            assert cell.start <= part.cell.start
            assert part.cell.start + part.cell.words <= cell.start + cell.words
            assert part.at == part.cell.start - cell.start
            assert part.cell.offset == cell.offset + part.at * cell.word_bytes
            assert part.cell.row_words == cell.row_words
            own = held[cell.tensor]
            tensor = layout.tensors[cell.tensor]
            origin = 0 if own.holders else own.first * (tensor.words // tensor.elements)
            assert part.source == part.cell.start - origin
            counts[cell.tensor][part.cell.start : part.cell.start + part.cell.words] += 1
    return counts


@st.composite
def worlds(draw):
    """A layout, and what each of RANKS ranks holds of it: replicated, on some ranks alone, in rows with or without a
    replica.
    """
    tensors, holdings = [], [[] for _ in range(RANKS)]
    for number in range(draw(st.integers(1, 5))):
        shape = (draw(st.integers(0, 9)), draw(st.integers(0, 4)))
        tensors.append(Tensor(f"t{number}", draw(st.sampled_from(["BF16", "F32", "C64", "U8"])), shape))
    cuts = draw(st.integers(1, 7))
    layout = Layout(tensors, cell_words=cuts)
    for tensor in layout.tensors:
        kind = draw(st.sampled_from(["all", "some", "rows", "replicas"]))
        some = tuple(sorted(draw(st.sets(st.integers(0, RANKS - 1), min_size=1))))
        width = tensor.shape[1]
        for rank in range(RANKS):
            if kind == "all":
                held = LocalShard(tuple(range(RANKS)))
            elif kind == "some":
                held = LocalShard(some, gather=True)
            else:
                shards_, shard = (RANKS, rank) if kind == "rows" else (RANKS // 2, rank % (RANKS // 2))
                first, rows = chunks(tensor.shape[0], shards_)[shard]
                replica = kind == "replicas" and rank >= RANKS // 2
                held = LocalShard(()) if replica else LocalShard((), first * width, rows * width)
            holdings[rank].append(held)
    return layout, holdings


@given(worlds(), st.integers(1, 5))
def test_every_word_has_one_owner(world, most):
    usual, shards.MAX_PART_WORDS = shards.MAX_PART_WORDS, most
    try:
        assert all((count == 1).all() for count in covered(*world))
    finally:
        shards.MAX_PART_WORDS = usual


def test_replicated_cells_are_dealt_in_turn():
    layout = Layout([Tensor("a", "BF16", (10,)), Tensor("b", "BF16", (6,))], cell_words=4)
    holdings = [LocalShard((0, 1))] * 2
    owned = [[p.cell.index for p in dealt(layout, holdings, rank)] for rank in (0, 1)]
    assert owned == [[0, 2, 4], [1, 3]]


def test_a_plain_tensor_is_everybodys():
    assert holding(torch.zeros(3), [0, 1, 5]) == LocalShard((0, 1, 2))


def test_a_part_fits_a_message():
    layout = Layout([Tensor("a", "F64", (3 * shards.MAX_PART_WORDS - 5,))], cell_words=2 * shards.MAX_PART_WORDS)
    parts = dealt(layout, [LocalShard((0,))], 0)
    assert [(p.cell.index, p.at, p.cell.words) for p in parts] == [
        (0, 0, shards.MAX_PART_WORDS),
        (0, shards.MAX_PART_WORDS, shards.MAX_PART_WORDS),
        (1, 0, shards.MAX_PART_WORDS - 5),
    ]
    assert max(p.cell.nbytes for p in parts) <= 32 << 20


@pytest.mark.parametrize("dims", [1, 2, 5, 8, 9])
def test_chunks_are_torchs(dims):
    """The test's own idea of a shard is torch's."""
    cut = torch.arange(dims).chunk(RANKS)
    assert [rows for _, rows in chunks(dims, RANKS)] == [len(cut[r]) if r < len(cut) else 0 for r in range(RANKS)]
