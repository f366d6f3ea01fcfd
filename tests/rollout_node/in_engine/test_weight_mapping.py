from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_node.in_engine.weight_mapping import NotABoxError, StridedBlock


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """The same random slicing, transposing and reshaping of a tensor's and a storage's element numbers, as in
    loaders.
    """
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    source = np.arange(np.prod(shape)).reshape(shape)
    for axis in range(source.ndim):
        low = draw(st.integers(0, source.shape[axis] - 1))
        high = draw(st.integers(low + 1, source.shape[axis]))
        source = source[(slice(None),) * axis + (slice(low, high, draw(st.integers(1, 2))),)]
    around = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(source.ndim)]
    room = np.arange(np.prod([n + a + b for n, (a, b) in zip(source.shape, around, strict=True)], dtype=int))
    room = room.reshape([n + a + b for n, (a, b) in zip(source.shape, around, strict=True)])
    target = room[tuple(slice(a, a + n) for n, (a, _) in zip(source.shape, around, strict=True))]
    order = draw(st.permutations(range(source.ndim)))
    return source.transpose(order), target.transpose(order)


def block_of(source: np.ndarray, target: np.ndarray) -> StridedBlock:
    strides = [tuple(s // a.itemsize for s in a.strides) for a in (source, target)]
    return StridedBlock.of(int(source.flat[0]), source.shape, strides[0], 7, int(target.flat[0]), strides[1])


@given(views(), st.integers(0, 5), st.data())
def test_locate_finds_exactly_the_views_elements(
    pair: tuple[np.ndarray, np.ndarray], first: int, data: st.DataObject
) -> None:
    source, target = pair
    block = block_of(source, target)
    truth = dict(zip(source.flat, target.flat, strict=True))
    asked = data.draw(st.sets(st.integers(first, 220)))
    positions = np.array(sorted(asked), dtype=np.int64)
    chosen, where = block.locate((positions - first).astype(np.uint32), first)
    found = dict(zip(positions[chosen].tolist(), where.tolist(), strict=True))
    assert found == {p: truth[p] for p in positions.tolist() if p in truth}


@given(views())
def test_runs_and_splits_cover_the_view_once(pair: tuple[np.ndarray, np.ndarray]) -> None:
    source, target = pair
    block = block_of(source, target)
    ascending = sorted(source.flat)
    assert [p for start, n in block.runs() for p in range(start, start + n)] == ascending
    parts = list(block.split(3))
    assert all(p.elements <= max(3, 1) for p in parts)
    assert sorted(p for part in parts for start, n in part.runs() for p in range(start, start + n)) == ascending
    assert block.elements == source.size
    assert block.end == ascending[-1] + 1


def test_fused_projection_has_one_dimension() -> None:
    block = StridedBlock.of(0, (64, 128), (128, 1), 3, 16384, (128, 1))
    assert (block.shape, block.from_stride, block.to_stride) == ((8192,), (1,), (1,))


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1)])
def test_overlapping_sources_are_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(NotABoxError):
        StridedBlock.of(0, (3, 3), strides, 0, 0, (3, 1))
