"""The versions that the trainer of the golden states published. `make_states.py` publishes them; tests compare the
states' contents with them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors

State = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype as the safetensors library calls it, shape, contents."""

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed.weight": ("bfloat16", (61, 17)),
    "model.norm.weight": ("float32", (53,)),
    "model.odd": ("uint8", (101,)),
    "model.wide": ("float64", (7, 3)),
}
WIDTHS = {"bfloat16": 2, "float32": 4, "uint8": 1, "float64": 8}
VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "1.4", "1.5")
"""In this order: steps 4 and 5 were published a second time, with other weights, so a branch began."""
FILES = {"config.json": b'{"golden": true}', "deep/er/file.txt": b"x"}
LIFETIME_DAYS = 3650
"""Of certificates in the golden states: those of the first run end in 2036."""


HEAD = VERSIONS[-1]


def step(version: str) -> int:
    return int(version.partition(".")[2])


def state(version: str) -> State:
    """Each is the one before with about a fiftieth of its words changed."""
    draw = np.random.default_rng(20260000)
    made = {n: (d, s, draw.bytes(int(np.prod(s)) * WIDTHS[d])) for n, (d, s) in SHAPES.items()}
    for _ in range(VERSIONS.index(version)):
        for name, (dtype, shape, contents) in made.items():
            words = np.frombuffer(contents, f"<u{WIDTHS[dtype]}").copy()
            chosen = draw.random(len(words)) < 0.02
            words[chosen] ^= draw.integers(1, 200, chosen.sum(), dtype=words.dtype)
            made[name] = (dtype, shape, words.tobytes())
    return made


def write(folder: Path, made: State) -> Path:
    """A checkpoint, complete from the moment it has its name."""
    part = folder.with_name(f".{folder.name}.new")
    part.mkdir(parents=True)
    kept = {n: np.frombuffer(c, np.uint8) for n, (_, _, c) in made.items()}
    specs = {
        n: safetensors.TensorSpec(dtype=d, shape=list(s), data_ptr=kept[n].ctypes.data, data_len=kept[n].nbytes)
        for n, (d, s, _) in made.items()
    }
    (part / "model.safetensors").write_bytes(safetensors.serialize(specs))
    for path, text in FILES.items():
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        (part / path).write_bytes(text)
    (part / "STABLE").touch()
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.old-{part.stat().st_ino}"))
    part.rename(folder)
    return folder
