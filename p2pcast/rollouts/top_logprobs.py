"""The most probable tokens of sampled positions, with their log-probabilities under the sampling distribution.

The learner's guard of sparse attention compares them with its own distribution (docs/guides/sparse-attention.md).

Guarantee: equal sets of tokens have equal ids, which ascend within a position. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from p2pcast.ground import limits
from p2pcast.rollouts.rollout_fields import MAX_SPANS, Count
from p2pcast.wire.constraints import AtMost, Blob, Integer

TOP_K: Final = 20
"""Tokens per position (Sparrow, section 3.1), and vLLM's default limit."""
MAX_TOP_K: Final = 256
MAX_TOP_BYTES: Final = 6 * limits.MIB
"""Most bytes of ids and values together: 52 000 positions with 20 tokens each."""
SUM_EXCESS: Final = 0.01
"""A position's probabilities sum to at most 1, plus this much for rounding to half precision."""
_ID, _VALUE = np.dtype("<u4"), np.dtype("<f2")


class TopLogprobs(NamedTuple):
    """``top_k``: tokens per position. ``spans``: positions [start, end) that have them. ``ids``: the tokens of these
    positions in order, as positions × top_k little-endian uint32. ``values``: their log-probabilities in float16, with
    a relative precision of 2 ** -11.
    """

    top_k: Annotated[int, Integer(1, MAX_TOP_K)]
    spans: Annotated[Sequence[tuple[Count, Count]], AtMost(MAX_SPANS)]
    ids: Annotated[bytes, Blob(MAX_TOP_BYTES)]
    values: Annotated[bytes, Blob(MAX_TOP_BYTES)]

    @property
    def positions(self) -> np.ndarray:
        """The positions that have tokens, as ascending int64."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(start, end) for start, end in self.spans)])

    @property
    def nbytes(self) -> int:
        return len(self.ids) + len(self.values)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and float32 values, as positions × top_k. Raises ValueError if the bytes have the wrong length."""
        ids, values = np.frombuffer(self.ids, _ID), np.frombuffer(self.values, _VALUE)
        shape = (len(self.positions), self.top_k)
        return ids.reshape(shape), values.reshape(shape).astype(np.float32)


def top_fault(top: TopLogprobs, mask: np.ndarray, vocabulary: int) -> str | None:
    """Why no engine can have sampled these, or None if nothing is wrong. ``mask``: 1 for sampled tokens."""
    at = 0
    for start, end in top.spans:
        if not at <= start < end <= len(mask) or not mask[start:end].all():
            return f"top log-probabilities of tokens {start} to {end}, which are not all sampled, or out of order"
        at = end
    if top.nbytes > MAX_TOP_BYTES:
        return f"{top.nbytes} bytes of top log-probabilities, and {MAX_TOP_BYTES} are allowed"
    cells = len(top.positions) * top.top_k
    if (len(top.ids), len(top.values)) != (cells * _ID.itemsize, cells * _VALUE.itemsize):
        return f"{top.nbytes} bytes for {len(top.positions)} positions with {top.top_k} log-probabilities each"
    ids, values = top.arrays()
    if ids.size and int(ids.max()) >= vocabulary:
        return f"a top log-probability of a token outside the vocabulary of {vocabulary}"
    if not (ids[:, 1:] > ids[:, :-1]).all():
        return "tokens of top log-probabilities that are repeated, or do not ascend"
    if not np.isfinite(values).all() or (values > 0).any() or (np.exp(values).sum(-1) > 1 + SUM_EXCESS).any():
        return "top log-probabilities that are those of no distribution"
    return None


class TopTokens:
    """Collects the top log-probabilities of a trajectory, turn by turn."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, start: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Add the sampled tokens from ``start`` on: tokens × top_k. Rows with a different top_k are left out."""
        if not len(ids) or (self._ids and ids.shape[1] != self._ids[0].shape[1]):
            return
        order = np.argsort(ids, axis=-1)
        self._spans.append((start, start + len(ids)))
        self._ids.append(np.take_along_axis(ids, order, -1))
        self._values.append(np.take_along_axis(values, order, -1))

    def packed(self) -> TopLogprobs | None:
        """The collected tokens, or None if there are none or they exceed MAX_TOP_BYTES."""
        if not self._ids:
            return None
        ids = np.concatenate(self._ids)
        if ids.size * (_ID.itemsize + _VALUE.itemsize) > MAX_TOP_BYTES:
            return None
        least = float(np.finfo(_VALUE).min)
        values = np.concatenate(self._values).clip(least, 0.0)
        return TopLogprobs(ids.shape[1], tuple(self._spans), ids.astype(_ID).tobytes(), values.astype(_VALUE).tobytes())
