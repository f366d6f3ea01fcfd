"""Memory of the codec beside its mapped states. A child process codes a large state to a file and reads the file back,
while its memory is sampled.

Two synthetic bf16 folders of the given size have normally distributed values, of which one in a hundred moves by an
ULP. The process maps both, as a hub does: ``offline.diff`` on all cores, then every cell decoded on all cores against
the old words. The figure is anonymous resident memory, interpreter and compiled kernels included, and its part before
the first cell.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from netem.bench.measuring import Peak, anonymous_bytes
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.artifact.assembly import Placed
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.cell import decode
from p2pcast.codec.kernel_warmup import warm_up
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.offline import diff

GIB = 1 << 30
COLUMNS = 4096
TENSOR_WORDS = 1 << 27
BLOCK_WORDS = 1 << 23
"""Words generated at a time."""
CHANGED = 0.01
SAMPLE_S = 0.002
SPARE_DISK_BYTES = 24 * GIB
"""Disk space left free beside the two states."""


def memory(state_bytes: int, codec: str, folder: Path | None = None) -> dict[str, Any]:
    """Peak memory of encoding and decoding a state of ``state_bytes`` (in whole blocks); two copies lie below
    ``folder`` meanwhile. Raises LocalError.
    """
    words = max(1, state_bytes // (2 * BLOCK_WORDS)) * BLOCK_WORDS
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=folder) as name:
        place = Path(name)
        if shutil.disk_usage(place).free < 4 * words + SPARE_DISK_BYTES:
            raise LocalError(
                f"{place}: two states of {2 * words} bytes leave less than {SPARE_DISK_BYTES} bytes of disk free"
            )
        _write_states(place, words)
        ours, theirs = (process := multiprocessing.get_context("spawn")).Pipe()
        child = process.Process(target=_child, args=(place, codec, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            found = _watched(child.pid or 0, ours)
        except EOFError:
            raise LocalError("the process that coded the synthetic state has died") from None
        finally:
            child.kill()
            child.join()
    return {"state_bytes": 2 * words, "cores": cores(), **found}


def _watched(pid: int, pipe: Connection) -> dict[str, int]:
    pipe.recv()
    found = {"before_bytes": anonymous_bytes(pid)}
    for key in ("encode_peak_bytes", "decode_peak_bytes"):
        peak = Peak(pid, SAMPLE_S)
        peak.start()
        pipe.send("go")
        said = pipe.recv()
        found[key] = peak.stop()
    return {**found, "peak_bytes": max(found["encode_peak_bytes"], found["decode_peak_bytes"]), "delta_bytes": said}


def _write_states(place: Path, words: int) -> None:
    rng = np.random.default_rng(0)
    sizes = [min(TENSOR_WORDS, words - at) for at in range(0, words, TENSOR_WORDS)]
    header = header_for(
        Layout([Tensor(f"t{k:03d}", "BF16", (size // COLUMNS, COLUMNS)) for k, size in enumerate(sizes)])
    )
    values = (rng.normal(0, 0.02, 2 * BLOCK_WORDS).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    folders = [place / "step_0", place / "step_1"]
    for folder in folders:
        folder.mkdir()
    with (folders[0] / "model.safetensors").open("wb") as old, (folders[1] / "model.safetensors").open("wb") as new:
        old.write(header)
        new.write(header)
        for _ in range(words // BLOCK_WORDS):
            begin = int(rng.integers(BLOCK_WORDS))
            block = values[begin : begin + BLOCK_WORDS].copy()
            old.write(block.data)
            moved = np.unique(rng.integers(0, BLOCK_WORDS, int(CHANGED * BLOCK_WORDS)))
            block[moved] += rng.choice(np.array([1, 0xFFFF], np.uint16), moved.size)
            new.write(block.data)


def _child(place: Path, codec: str, pipe: Connection) -> None:
    warm_up()
    pipe.send("ready")
    pipe.recv()
    written = diff(place / "step_0", place / "step_1", place / "delta.p2pd", codec=codec)
    pipe.send(written.nbytes)
    pipe.recv()
    _decode_all(place / "step_0", written.path)
    pipe.send(written.nbytes)
    pipe.recv()


def _decode_all(base: Path, delta: Path) -> None:
    checkpoint = Checkpoint.open(base)
    with P2pdFile.open(delta) as file:

        def decoded(placed: Placed) -> int:
            words = checkpoint.lent(file.layout.cells[placed.cell])
            patch = decode(
                file.layout.cells[placed.cell], placed.codec, file.read_cell(placed), words, placed.before, placed.after
            )
            return patch.changed

        for _ in ordered_map(decoded, file.assembly.directory, workers=cores(), name="decode"):
            pass
