"""Versions of weights that an experiment's trainer saves: real weights under real optimiser steps, or words that are
all new in each version.

Nothing here waits for a clock; the same arguments give the same words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors

from p2pcast.ground.limits import KIB

Tensors = Mapping[str, tuple[str, Sequence[int], npt.NDArray[Any]]]
"""Name → dtype as in a safetensors header (BF16, F16), shape, words."""
DTYPES: Final = {"BF16": "bfloat16", "F16": "float16"}
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


def noise(payload_bytes: int, still: int = 0) -> Iterator[Tensors]:
    """Random words, all new in every version: no codec can make the delta smaller than the payload. ``still``: that
    many tensors of a payload each never change.
    """
    random, unchanged = np.random.default_rng(0), np.random.default_rng(1)
    count = max(1, payload_bytes // TENSOR_BYTES)
    words = payload_bytes // count // 2
    kept = {f"still{n}": _drawn(unchanged, payload_bytes // 2) for n in range(still)}
    while True:
        yield {f"w{n:05}": _drawn(random, words) for n in range(count)} | kept


def _drawn(random: np.random.Generator, words: int) -> tuple[str, Sequence[int], npt.NDArray[Any]]:
    return "F16", (words,), random.integers(0, 1 << 16, words, np.uint16)


def nbytes(tensors: Tensors) -> int:
    """Size of all words."""
    return sum(words.nbytes for _, _, words in tensors.values())


def write_weights(tensors: Tensors, file: Path) -> None:
    specs = {
        name: safetensors.TensorSpec(
            dtype=DTYPES[kind], shape=list(shape), data_ptr=words.ctypes.data, data_len=words.nbytes
        )
        for name, (kind, shape, words) in tensors.items()
    }
    safetensors.serialize_file(specs, file)
