"""The checkpoints of the bars' trainer: bf16 weights under steps of AdamW's size, the same words every time. No clock,
no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors

from p2pcast.ground.limits import MIB

LEARNING_RATE: Final = 1e-6
"""With this rate a step changes one bf16 word in forty, as in RL."""
TENSORS: Final = 4
COLUMNS: Final = 1024

Words = npt.NDArray[np.uint16]
State = dict[str, Words]


def _bf16(values: npt.NDArray[np.float32]) -> Words:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded: Words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def step(mib: int, seed: int = 0) -> tuple[State, State]:
    """The weights before and after one optimiser step."""
    draw, words = np.random.default_rng(seed), mib * MIB // 2 // TENSORS
    old, new = {}, {}
    for number in range(TENSORS):
        master = draw.standard_normal(words, dtype=np.float32) * np.float32(0.03)
        update = np.clip(2 * draw.standard_normal(words, dtype=np.float32), -1, 1)
        old[f"layer.{number}"], new[f"layer.{number}"] = (
            _bf16(master),
            _bf16(master - np.float32(LEARNING_RATE) * update),
        )
    return old, new


def moved(state: State, count: int, seed: int) -> State:
    """The state with ``count`` words changed by one."""
    draw = np.random.default_rng(seed)
    out = {name: words.copy() for name, words in state.items()}
    for words in out.values():
        words[draw.choice(len(words), count // len(out), replace=False)] += 1
    return out


def save(folder: Path, state: State) -> Path:
    """Write a checkpoint under a temporary name, then rename it, so readers see it only when it is complete."""
    part = folder.with_name(f".{folder.name}.new")
    part.mkdir(parents=True)
    specs: dict[str, Any] = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=[len(words) // COLUMNS, COLUMNS], data_ptr=words.ctypes.data, data_len=words.nbytes
        )
        for name, words in state.items()
    }
    safetensors.serialize_file(specs, part / "model.safetensors")
    (part / "STABLE").touch()
    return part.rename(folder)
