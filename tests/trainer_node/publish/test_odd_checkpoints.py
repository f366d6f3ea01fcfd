"""Odd but valid checkpoints, and wrong ones, from a folder through encoder and decoder to the shadow. The safetensors
library reads both ends. The files are written by hand, since no writer makes all of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from parts import Encoder

from p2pcast.checkpoint import Checkpoint
from p2pcast.checkpoint.folder import INDEX
from p2pcast.checkpoint.folder_form import DEFAULT
from p2pcast.codec.layout import DTYPES, Tensor
from p2pcast.ground.errors import P2PCastError
from tests.trainer_node.publish.test_checkpoint_source import Versions
from trainer_node.publish.checkpoint_source import CheckpointSource
from trainer_node.publish.checkpoint_watcher import FoundCheckpoint, fingerprint_of
from trainer_node.publish.publish_history import PublishHistory

Table = dict[str, tuple[str, tuple[int, ...], bytes]]
Files = dict[str, bytes]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def filled(seed: int, **tensors: tuple[str, tuple[int, ...]]) -> Table:
    draw = np.random.default_rng(seed)
    return {
        name: (dtype, shape, draw.bytes(Tensor(name, dtype, shape).nbytes)) for name, (dtype, shape) in tensors.items()
    }


def file(table: Table, metadata: Any = "absent", *, pad: int = 0) -> bytes:
    """In the order of ``table``. ``pad``: spaces after the header."""
    header: dict[str, Any] = {} if metadata == "absent" else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, contents) in table.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(contents)]}
        at += len(contents)
    text = json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + b"".join(contents for _, _, contents in table.values())


def single(table: Table, metadata: Any = "absent", *, pad: int = 0) -> Files:
    return {"model.safetensors": file(table, metadata, pad=pad)}


def sharded(one: Table, two: Table, **index: str) -> Files:
    """``index``: wrong entries, or a leftover one."""
    named = {**dict.fromkeys(one, ONE), **dict.fromkeys(two, TWO), **index}
    return {ONE: file(one), TWO: file(two), INDEX: json.dumps({"weight_map": named}).encode()}


def words(dtype: str, width: int, *values: int) -> tuple[str, tuple[int, ...], bytes]:
    return dtype, (len(values),), b"".join(value.to_bytes(width, "little") for value in values)


A, B = filled(1, a=("F32", (3, 4)), b=("BF16", (257,))), filled(2, a=("F32", (3, 4)), b=("BF16", (257,)))
C = filled(3, c=("I32", (9,)))
NOTHING = filled(4, none=("BF16", (0, 5)), flat=("F32", (3, 0)))
NANS: Table = {
    "f32": words("F32", 4, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0, 1, 0x7F800000),
    "bf16": words("BF16", 2, 0x7FC1, 0xFFFF, 0x8000, 0, 0x7F81, 0xFF80),
    "f64": words("F64", 8, 0x7FF0000000000001, 0xFFF8000000000000, 1 << 63, 0, 1),
    "f16": words("F16", 2, 0x7E01, 0xFC01, 0x8000, 0, 1, 0x7C00),
    "c64": ("C64", (2,), bytes.fromhex("010080ff000000800100c07f00000000")),
}
TURNED: Table = {name: (dtype, shape, contents[::-1]) for name, (dtype, shape, contents) in NANS.items()}

CASES: dict[str, tuple[Files, Files, str]] = {
    **{
        d: (single(filled(5, x=(d, (8, 13)), y=("U8", (3,)))), single(filled(6, x=(d, (8, 13)), y=("U8", (3,)))), "")
        for d in sorted(DTYPES)
    },
    "NaN payloads and negative zeros": (single(NANS), single(TURNED), ""),
    "zeros that change their sign alone": (
        single({"z": words("F32", 4, 0, 1 << 31)}),
        single({"z": words("F32", 4, 1 << 31, 0)}),
        "",
    ),
    "no dimension": (
        single(filled(7, s=("F32", ()), t=("BOOL", ()))),
        single(filled(8, s=("F32", ()), t=("BOOL", ()))),
        "",
    ),
    "sizes of zero": (single({**A, **NOTHING}), single({**B, **NOTHING}), ""),
    "nothing but sizes of zero": (single(NOTHING), single(NOTHING), ""),
    "another size of zero": (
        single({**A, **NOTHING}),
        single({**B, **filled(1, none=("BF16", (5, 0)), flat=("F32", (3, 0)))}),
        "",
    ),
    "a tensor has another name": (single(A), single({"a2": B["a"], "b": B["b"]}), ""),
    "a tensor goes": (single(A), single({"b": B["b"]}), ""),
    "a tensor comes": (single(A), single({**B, **C}), ""),
    "two tensors change their names": (single({"x": A["a"], "y": B["a"]}), single({"y": A["a"], "x": B["a"]}), ""),
    "another shape of the same bytes": (single(A), single({"a": ("F32", (4, 3), A["a"][2]), "b": A["b"]}), ""),
    "another dtype of the same bytes": (single(A), single({"a": ("I32", (3, 4), A["a"][2]), "b": A["b"]}), ""),
    "one file, then shards": (single(A | C), sharded(B, C), ""),
    "shards, then one file": (sharded(A, C), single(B | C), ""),
    "shards that are split anew": (
        sharded({"a": A["a"]}, {"b": A["b"], **C}),
        sharded({"a": B["a"], "b": B["b"]}, C),
        "",
    ),
    "a leftover shard": (
        sharded(A, C),
        {**sharded(B, C), "model-00003-of-00003.safetensors": file(filled(9, a=("F32", (3, 4))))},
        "",
    ),
    "a leftover index next to one file": (
        single(A),
        {**single(B), INDEX: b'{"weight_map": {"gone": "gone.safetensors"}}'},
        "",
    ),
    "leftovers of training": (single(A), {**single(B), "optimizer.pt": b"x", "pytorch_model.bin": b"y"}, ""),
    "another order in the file": (single(A | C), single(dict(reversed((B | C).items()))), ""),
    "data at an odd place": (
        single({"o": ("U8", (3,), b"abc"), **A}),
        single({"o": ("U8", (3,), b"abd"), **B}, pad=3),
        "",
    ),
    "names with odd characters": (
        single({"ü/…\n\"'": A["a"], "": A["b"]}),
        single({"ü/…\n\"'": B["a"], "": B["b"]}),
        "",
    ),
    "no metadata, null and empty metadata": (single(A, None), single(B, {}), ""),
    "the same again": (single(A), single(A), ""),
    "a shard that is not there": (sharded(A, C), {n: c for n, c in sharded(B, C).items() if n != TWO}, TWO),
    "an index with the wrong shard": (sharded(A, C), sharded(B, C, c=ONE), "'c'"),
    "an index with a leftover name": (sharded(A, C), sharded(B, C, old=TWO), "'old'"),
    "a tensor in both shards": (sharded(A, C), sharded(B, {**C, "a": A["a"]}), "'a'"),
    "a file that is cut short": (single(A), {"model.safetensors": single(B)["model.safetensors"][:-1]}, "cut short"),
}


def read(folder: Path, names: list[str]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = [one for name in names for one in safetensors.deserialize((folder / name).read_bytes())]
    return {name: (str(one["dtype"]), tuple(one["shape"]), bytes(one["data"])) for name, one in found}


@pytest.mark.parametrize("name", CASES)
async def test_odd_checkpoints_equal_the_reading_of_safetensors(tmp_path: Path, encoder: Encoder, name: str) -> None:
    *states, fault = CASES[name]
    versions = Versions()
    history = PublishHistory(tmp_path / "published.log", set)
    source = CheckpointSource(versions, encoder.pipeline, history, encoder.staging, DEFAULT)  # type: ignore[arg-type]
    shadow = tmp_path / "shadow"
    for step, files in enumerate(states):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        for path, contents in files.items():
            (folder / path).write_bytes(contents)
        shards = ["model.safetensors"] if "model.safetensors" in files else [ONE, TWO]
        if step == 1 and fault:
            with pytest.raises(P2PCastError, match=fault):
                Checkpoint.open(folder)
            break
        found = fingerprint_of(step, folder, DEFAULT.marker)
        assert found is not None
        await source.take(FoundCheckpoint(step, folder, found, Checkpoint.open(folder)))
        assert versions.skipped == {}
        assert read(shadow, ["model.safetensors"]) == read(folder, shards)
        shutil.rmtree(folder)
    assert len(versions.finished) == (1 if fault else 2)
    history.close()
