"""Digests of live weights on their device equal those of the host's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_node.in_engine import weight_audit
from rollout_node.in_engine.weight_audit import digest_in_place, digest_on_host
from rollout_node.in_engine.weight_mapping import StridedBlock
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def storage(dtype: torch.dtype, words: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(np.random.default_rng(words).bytes(words * dtype.itemsize)), dtype=dtype)


@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(1, 30), columns=st.integers(1, 40), wide=st.integers(0, 60),
    chunk=st.sampled_from([1, 7, 100, 1 << 20]), start=st.integers(0, 3000), transposed=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_digest_of_shards_of_rows_and_columns(dtype, rows, columns, wide, chunk, start, transposed):
    """``columns`` columns of rows that are ``wide`` longer in the checkpoint, as they are or transposed in the
    engine.
    """
    words = storage(dtype, rows * columns + 5)
    to = (1, rows) if transposed else (columns, 1)
    block = StridedBlock.of(start, (rows, columns), (columns + wide, 1), 0, 5, to)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_audit, "_CHUNK_WORDS", chunk)
        assert digest_in_place(3, block, words.to(DEVICE)) == digest_on_host(3, block, words)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_of_whole_and_single_element_blocks(dtype):
    words = storage(dtype, 5000)
    for block in (
        StridedBlock.of(77, (4999,), (1,), 0, 1, (1,)),
        StridedBlock.of(0, (1,), (1,), 0, 9, (1,)),
        StridedBlock.of(3, (20,), (11,), 0, 9, (2,)),
    ):
        assert digest_in_place(0, block, words.to(DEVICE)) == digest_on_host(0, block, words)
