"""States of which a trainer changes few words, as words of float16. The same arguments give the same words."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from p2pcast.ground.limits import KIB

Tensors = dict[str, npt.NDArray[np.float16]]
TENSOR_BYTES = 256 * KIB
"""Small cells, so that 24 MiB of delta have as many cells as a large model's delta."""


class SparseWeights:
    """``state_bytes`` of which a few words change in each state, so that a delta has about ``delta_bytes``."""

    def __init__(self, state_bytes: int, delta_bytes: int) -> None:
        self._random = np.random.default_rng(0)
        count = max(1, state_bytes // TENSOR_BYTES)
        self._size = state_bytes // count // 2
        self._words = self._random.integers(0, 1 << 16, (count, self._size), np.uint16)
        self.delta_bytes = delta_bytes
        self._first = True

    def __call__(self) -> Tensors:
        """The next state."""
        if not self._first:
            flat = self._words.reshape(-1)
            at = self._random.choice(flat.size, changed_words(flat.size, self.delta_bytes), replace=False)
            flat[at] ^= self._random.integers(1, 1 << 16, len(at), np.uint16)
        self._first = False
        return {f"w{n:05}": row.view(np.float16).copy() for n, row in enumerate(self._words)}


def changed_words(words: int, delta_bytes: int) -> int:
    """How many random words of ``words`` make a delta of about ``delta_bytes``: a new word takes two bytes, and its
    place the entropy of a geometric gap.
    """
    changed = max(1, delta_bytes // 4)
    for _ in range(20):
        share = min(0.5, changed / words)
        place_bits = math.log2(1 / share) + 1.44
        changed = max(1, min(words, int(delta_bytes / (2 + place_bits / 8))))
    return changed
