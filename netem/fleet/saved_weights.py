"""Versions of weights that an experiment's trainer saves: real weights under real optimiser steps, or words that are
all new in each version.

Nothing here waits for a clock; the same arguments give the same words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p2pcast.ground.limits import KIB

Tensors = Mapping[str, tuple[str, Sequence[int], npt.NDArray[Any]]]
"""Name → dtype as in a safetensors header (BF16, F16), shape, words."""
TENSOR_BYTES: Final = 256 * KIB
"""Small cells, so that a few MB have as many cells as a large model."""
TRAINING_THREADS: Final = 2
"""On a busy machine, four threads that waited for one another took ten times as long."""


def trained(learning_rate: float, copies: int = 1) -> Iterator[Tensors]:
    """A pretrained encoder (22.6 M parameters) under AdamW, one optimiser step a version, without end. ``copies``: the
    state holds so many encoders, each one step ahead of the previous, so none repeats another. Needs torch,
    transformers and the weights' package. Raises LocalError.
    """
    import torch

    from netem.fleet.adamw_steps import endless_states

    torch.set_num_threads(TRAINING_THREADS)
    layout, states = endless_states(learning_rate)
    kept: deque[dict[str, npt.NDArray[np.uint16]]] = deque(maxlen=copies)
    for state in states:
        kept.append(state)
        if len(kept) == copies:
            yield {
                f"{at}.{t.name}": (t.dtype, t.shape, copy[t.name])
                for at, copy in enumerate(kept)
                for t in layout.tensors
            }


def noise(payload_bytes: int, seed: int = 0) -> Iterator[Tensors]:
    """Random words, all new in every version: no codec can make the delta smaller than the payload."""
    random = np.random.default_rng(seed)
    count = max(1, payload_bytes // TENSOR_BYTES)
    words = payload_bytes // count // 2
    while True:
        yield {f"w{n:05}": ("F16", (words,), random.integers(0, 1 << 16, words, np.uint16)) for n in range(count)}


def nbytes(tensors: Tensors) -> int:
    """Size of all words."""
    return sum(words.nbytes for _, _, words in tensors.values())
