from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pcast.checkpoint import Checkpoint, write_folder
from p2pcast.codec.layout import Cell
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError

Make = Callable[..., Path]


def _tensors(seed: int = 0) -> dict[str, tuple[str, list[int], bytes]]:
    draw = random.Random(seed)
    return {
        "z": ("BF16", [3, 7], draw.randbytes(42)),
        "flag": ("BOOL", [3], b"\1\0\1"),
        "none": ("F16", [0, 3], b""),
        "scalar": ("F32", [], draw.randbytes(4)),
        "i": ("I64", [5], draw.randbytes(40)),
        "c": ("C64", [2], draw.randbytes(16)),
        "f8": ("F8_E4M3", [9], draw.randbytes(9)),
        "f4": ("F4", [3, 6], draw.randbytes(9)),
    }


def _contents(checkpoint: Checkpoint, cell_words: int = 4) -> dict[str, bytes]:
    layout = checkpoint.layout(cell_words=cell_words)
    out = {t.name: b"" for t in layout.tensors}
    for cell in layout.cells:
        words = checkpoint.words(cell)
        assert words.dtype == np.dtype(f"u{cell.word_bytes}")
        assert words.size == cell.words
        assert not words.flags.writeable
        assert words.flags.aligned
        out[layout.tensors[cell.tensor].name] += words.tobytes()
    return out


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("pad", range(8))
def test_tensors_are_read_at_any_alignment(tmp_path: Path, make_checkpoint: Make, pad: int, shards: int) -> None:
    tensors = _tensors()
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "m", tensors, pad=pad, shards=shards))
    for cell_words in (1, 4, 1 << 22):
        assert _contents(checkpoint, cell_words) == {n: c for n, (_, _, c) in tensors.items()}
    assert checkpoint.layout() is checkpoint.layout()
    assert {t.name: [t.dtype, list(t.shape)] for t in checkpoint.layout().tensors} == {
        n: [d, s] for n, (d, s, _) in tensors.items()
    }


def test_lent_memory_is_reused_per_thread_and_words_are_not(tmp_path: Path, make_checkpoint: Make) -> None:
    checkpoint = Checkpoint.open(
        make_checkpoint(tmp_path / "m", {"a": ("F32", [2], bytes(8)), "b": ("BF16", [1], b"xy")})
    )
    cells = checkpoint.layout().cells
    assert not np.shares_memory(checkpoint.words(cells[0]), checkpoint.words(cells[0]))
    lent = checkpoint.lent(cells[0])
    assert lent.tolist() == [0, 0]
    assert np.shares_memory(lent, checkpoint.lent(cells[1]))
    assert not lent.flags.writeable
    with ThreadPoolExecutor(1) as pool:
        assert not np.shares_memory(lent, pool.submit(checkpoint.lent, cells[0]).result())


def test_file_cut_short_during_reading_is_an_error(tmp_path: Path, make_checkpoint: Make) -> None:
    """This holds even if the last page still exists as a whole, which a map would show as zeros."""
    folder = make_checkpoint(tmp_path / "m", {"a": ("U8", [100_000], bytes(100_000))})
    checkpoint = Checkpoint.open(folder)
    (cell,) = checkpoint.layout().cells
    size = (folder / "model.safetensors").stat().st_size
    for left in (size - 1, size - 5000, 10, 0):
        os.truncate(folder / "model.safetensors", left)
        for read in (checkpoint.words, checkpoint.lent):
            with pytest.raises(LocalError, match=r"model\.safetensors: the file was cut short during reading"):
                read(cell)


def test_folder_may_be_deleted_during_reading(tmp_path: Path, make_checkpoint: Make) -> None:
    folder = make_checkpoint(tmp_path / "m", _tensors())
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    assert _contents(checkpoint)["z"] == _tensors()["z"][2]


def test_only_safetensors_file_needs_no_index(tmp_path: Path, make_checkpoint: Make) -> None:
    folder = make_checkpoint(tmp_path / "m", _tensors())
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(Checkpoint.open(folder).layout().tensors) == 8
    (folder / "more.safetensors").write_bytes((folder / "weights.safetensors").read_bytes())
    with pytest.raises(LocalError, match=r"2 \.safetensors files"):
        Checkpoint.open(folder)


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="not a Hugging Face safetensors folder"):
        Checkpoint.open(tmp_path)
    with pytest.raises(LocalError, match="no such file or folder"):
        Checkpoint.open(tmp_path / "none")


def _index(folder: Path, text: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize(
    "name",
    [
        "../m2/model-00001-of-00002.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        ".x.safetensors",
        "x.bin",
        "..",
        "",
        "a\0.safetensors",
    ],
)
def test_index_entries_must_stay_in_the_folder(tmp_path: Path, make_checkpoint: Make, name: str) -> None:
    make_checkpoint(tmp_path / "m2", _tensors(), shards=2)
    folder = make_checkpoint(tmp_path / "m", _tensors(), shards=2)
    _index(folder, {"weight_map": {"z": name}})
    with pytest.raises(IntegrityError, match=r"is not a \.safetensors file of this folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b", "a": "c"}}']
)
def test_malformed_index_is_refused(tmp_path: Path, make_checkpoint: Make, text: str) -> None:
    folder = make_checkpoint(tmp_path / "m", _tensors(), shards=2)
    _index(folder, text)
    with pytest.raises(IntegrityError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(folder)


def test_index_must_match_its_files(tmp_path: Path, make_checkpoint: Make) -> None:
    folder = make_checkpoint(tmp_path / "m", _tensors(), shards=2)
    path = folder / "model.safetensors.index.json"
    table = json.loads(path.read_text())["weight_map"]
    first, second = sorted(set(table.values()))
    for wrong, words in [
        ({k: v for k, v in table.items() if k != "z"}, "'z': the index says None"),
        ({**table, "ghost": first}, "'ghost'"),
        ({**table, "z": second if table["z"] == first else first}, "'z'"),
    ]:
        _index(folder, {"weight_map": wrong})
        with pytest.raises(IntegrityError, match=words):
            Checkpoint.open(folder)
    _index(folder, {"weight_map": {**table, "z": "gone.safetensors"}})
    with pytest.raises(LocalError, match=r"gone\.safetensors: there is no such file"):
        Checkpoint.open(folder)
    (folder / second).write_bytes((folder / first).read_bytes())
    _index(folder, {"weight_map": table})
    with pytest.raises(IntegrityError, match="is in"):
        Checkpoint.open(folder)


def test_small_files_and_skipped_files(tmp_path: Path, make_checkpoint: Make) -> None:
    kept = {"config.json": b"{}", "sub/vocab.txt": b"a", "empty": b""}
    left = {
        "optimizer.pt": b"1",
        "pytorch_model.bin": b"1",
        "STABLE": b"",
        ".cache/x": b"1",
        "sub/.x": b"1",
        "extra.safetensors": b"1",
    }
    folder = make_checkpoint(tmp_path / "m", _tensors(), {**kept, **left})
    with (folder / "huge").open("wb") as file:
        file.truncate(limits.MAX_SMALL_FILE_BYTES + 1)
    os.mkfifo(folder / "pipe")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "outdir").symlink_to(tmp_path)
    (folder / "in").symlink_to("config.json")
    (folder / "dangling").symlink_to("nothing")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.small_files() == {**kept, "in": b"{}"}
    skipped = dict(checkpoint.skipped)
    assert skipped.keys() == {"optimizer.pt", "pytorch_model.bin", "huge", "pipe", "out", "outdir", "dangling"}
    assert skipped["out"] == skipped["outdir"] == "a link that leaves the folder"
    assert checkpoint.small_files() == {**kept, "in": b"{}"}
    assert len(checkpoint.skipped) == 7


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path, make_checkpoint: Make) -> None:
    """snapshots/<commit>/ holds links to ../../blobs/<hash>."""
    hub = tmp_path / "models--x"
    folder = make_checkpoint(hub / "snapshots" / "abc", _tensors(), {"config.json": b"{}"})
    (hub / "blobs").mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(hub / "blobs" / f"{name}-hash")
        (folder / name).symlink_to(f"../../blobs/{name}-hash")
    checkpoint = Checkpoint.open(folder)
    assert _contents(checkpoint)["z"] == _tensors()["z"][2]
    assert checkpoint.small_files() == {"config.json": b"{}"}


@pytest.mark.parametrize("workers", [1, 3])
def test_written_folders_read_back(tmp_path: Path, make_checkpoint: Make, workers: int) -> None:
    source = Checkpoint.open(make_checkpoint(tmp_path / "m", _tensors(), pad=3, shards=3))
    files = {"config.json": b"{}", "sub/a/b.txt": b"x"}
    write_folder(tmp_path / "out", source.layout(cell_words=4), source.words, files, workers=workers)
    again = Checkpoint.open(tmp_path / "out")
    assert _contents(again) == _contents(source)
    assert again.layout() == source.layout()
    assert again.small_files() == files
    assert sorted(os.listdir(tmp_path)) == ["m", "out"]


def test_torch_loads_a_written_folder(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(5, 3).to(torch.bfloat16),
        "b": torch.randn(()),
        "c": torch.arange(4),
        "d": torch.tensor([True, False]),
        "e": torch.zeros(0, 2),
        "f": torch.randn(3).to(torch.float8_e4m3fn),
    }
    (tmp_path / "m").mkdir()
    save_file(state, tmp_path / "m" / "model.safetensors")
    source = Checkpoint.open(tmp_path / "m")
    write_folder(tmp_path / "out", source.layout(), source.words, {})
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_failed_write_leaves_no_folder(tmp_path: Path, make_checkpoint: Make) -> None:
    source = Checkpoint.open(make_checkpoint(tmp_path / "m", _tensors()))
    layout = source.layout(cell_words=4)

    def full(cell: Cell) -> Any:
        if cell.index == 5:
            raise OSError(errno.ENOSPC, "full")
        return source.words(cell)

    def refuse() -> None:
        raise IntegrityError("no")

    with pytest.raises(LocalError, match=r"model\.safetensors: no space is left"):
        write_folder(tmp_path / "out", layout, full, {"config.json": b"{}"}, workers=2)
    with pytest.raises(IntegrityError, match="no"):
        write_folder(tmp_path / "out", layout, source.words, {}, before_rename=refuse)
    with pytest.raises(LocalError, match="bytes written"):
        write_folder(tmp_path / "out", layout, lambda cell: source.words(layout.cells[0]), {})
    for path in ("../x", "model.safetensors", "/x"):
        with pytest.raises(IntegrityError, match="small file"):
            write_folder(tmp_path / "out", layout, source.words, {path: b""})
    assert os.listdir(tmp_path) == ["m"]
