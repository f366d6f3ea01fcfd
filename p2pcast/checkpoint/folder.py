"""A Hugging Face checkpoint folder, read as a canonical state or written as one.

Guarantees: reading never leaves the folder (except through the Hugging Face cache's own links), and every shard is
validated before any weight is read. If a file is cut short during reading, an error is raised. A written folder appears
under its name only once it is complete.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.artifact.signed_records import path_fault
from p2pcast.checkpoint.adapter_form import CONFIG, WEIGHTS, checked_name, state_name
from p2pcast.checkpoint.safetensors_file import SafetensorsFile, as_words, header_for, parse_json
from p2pcast.codec.layout import Cell, Layout, Tensor, cell_bytes
from p2pcast.codec.scratch import ScratchBuffers
from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_folder, explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from p2pcast.ground.ordered_map import ordered_map

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (
    ".bin", ".bin.index.json", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx",
    ".pkl", ".pt", ".pth",
)  # fmt: skip
"""Suffixes of weights in other formats and of training state. A version's small files are those that an engine needs in
addition to the weights.
"""


class Checkpoint:
    """The tensors of one folder. Thread-safe."""

    def __init__(self, folder: Path, files: Sequence[SafetensorsFile], adapters: Sequence[str] = ()) -> None:
        """Use ``Checkpoint.open``. ``adapters``: each file's adapter, which precedes its tensors' names. Raises
        IntegrityError if two files contain the same tensor.
        """
        self.folder = folder
        self.files, self.adapters = tuple(files), tuple(adapters)
        where: dict[str, tuple[SafetensorsFile, int]] = {}
        tensors: list[Tensor] = []
        for file, adapter in zip(files, adapters or [""] * len(files), strict=True):
            for found, begin in file.header.tensors:
                tensor = replace(found, name=state_name(adapter, found.name))
                tensor.check()
                if tensor.name in where:
                    raise IntegrityError(
                        f"{folder}: tensor {tensor.name[:80]!r} is in {where[tensor.name][0].path.name} "
                        f"and in {file.path.name}"
                    )
                where[tensor.name] = (file, begin)
                tensors.append(tensor)
        self._layout = Layout(tensors)
        self._sources = [where[t.name] for t in self._layout.tensors]
        self._room = ScratchBuffers()
        self.skipped: list[tuple[str, str]] = []
        """Files left out by ``small_files``: (path, reason)."""

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Open ``model.safetensors``, else the shards in its index, else the only ``.safetensors`` file. LoRA adapters
        in subfolders, ``ADAPTER/adapter_model.safetensors``, belong to the state, even if there is no model.

        Raises LocalError, IntegrityError.
        """
        folder = Path(folder)
        with explained("read", folder):
            names = sorted(os.listdir(folder))
            adapters = [n for n in names if _is_adapter(folder / n)]
        found = [n for n in names if n.endswith(".safetensors")]
        if adapters and found == [WEIGHTS]:
            raise LocalError(
                f"{folder}: {WEIGHTS} lies beside adapters in subfolders ({', '.join(adapters)}): move it and its"
                f" {CONFIG} to a subfolder with the adapter's name"
            )
        model = [] if adapters and not found else cls._open_model(folder, names, found)
        try:
            named = [checked_name(name) for name in adapters]
        except UsageError as error:
            raise LocalError(f"{folder}: {error}") from None
        beside = [SafetensorsFile(folder / name / WEIGHTS) for name in named]
        return cls(folder, [*model, *beside], [""] * len(model) + named)

    @classmethod
    def _open_model(cls, folder: Path, names: list[str], found: list[str]) -> list[SafetensorsFile]:
        """Open the model's files. ``found``: those of the ``names`` that have safetensors' suffix."""
        if SINGLE in names:
            shards = [SINGLE]
        elif INDEX in names:
            return cls._open_sharded(folder)
        elif len(found) == 1:
            shards = found
        elif found:
            raise LocalError(
                f"{folder}: {len(found)} .safetensors files and no {INDEX}; "
                "add the index, or name a folder with one file"
            )
        else:
            raise LocalError(f"{folder}: no {SINGLE} and no {INDEX}: not a Hugging Face safetensors folder")
        return [SafetensorsFile(folder / n) for n in shards]

    @classmethod
    def _open_sharded(cls, folder: Path) -> list[SafetensorsFile]:
        where = str(folder / INDEX)
        with explained("read", where), (folder / INDEX).open("rb") as file:
            text = file.read(limits.MAX_SAFETENSORS_HEADER_BYTES + 1)
        if len(text) > limits.MAX_SAFETENSORS_HEADER_BYTES:
            raise IntegrityError(f"{where}: over the limit of {limits.MAX_SAFETENSORS_HEADER_BYTES} bytes")
        index = parse_json(text, where)
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise IntegrityError(f"{where}: weight_map is not a map from tensor to file")
        shards = sorted(set(table.values()))
        for name in shards:
            if "/" in name or "\\" in name or "\0" in name or name.startswith(".") or not name.endswith(".safetensors"):
                raise IntegrityError(f"{where}: {name[:80]!r} is not a .safetensors file of this folder")
        files = cls(folder, [SafetensorsFile(folder / n) for n in shards]).files
        held = {t.name: f.path.name for f in files for t, _ in f.header.tensors}
        if held != table:
            wrong = sorted(n for n in held.keys() | table.keys() if held.get(n) != table.get(n))
            name = wrong[0]
            raise IntegrityError(
                f"{where}: {len(wrong)} tensors are not in the stated file; first {name[:80]!r}: "
                f"the index says {table.get(name)}, found in {held.get(name)}"
            )
        return list(files)

    def layout(self, *, cell_words: int = limits.CELL_WORDS, cuts: Mapping[int, Sequence[int]] | None = None) -> Layout:
        """Return the layout of the tensors, cut into cells of at most ``cell_words`` words."""
        if cell_words == self._layout.cell_words and not cuts:
            return self._layout
        return Layout(self._layout.tensors, cell_words=cell_words, cuts=cuts)

    def words(self, cell: Cell) -> npt.NDArray[Any]:
        """Return a cell's words, unsigned and read-only, in newly allocated memory.

        The cell may belong to any layout with the same tensors. Raises LocalError, also if the file was cut short.
        """
        file, begin = self._sources[cell.tensor]
        return file.words(cell.word_bytes, begin + cell.start * cell.word_bytes, cell.words)

    def lent(self, cell: Cell) -> npt.NDArray[Any]:
        """Return a cell's words in memory that this thread's next call overwrites. Since the memory is reused, reading
        is as fast as mapping the file.
        """
        file, begin = self._sources[cell.tensor]
        room = self._room.array("words", cell.nbytes, np.uint8)
        file.read(room, begin + cell.start * cell.word_bytes)
        return as_words(room, cell.word_bytes)

    def small_files(self) -> dict[str, bytes]:
        """Return path → contents of configuration, tokenizer and similar files; ``skipped`` then lists the files left
        out. Raises LocalError.
        """
        self.skipped = []
        out: dict[str, bytes] = {}
        total = 0
        with explained("read", self.folder):
            for path, entry in _walk(self.folder):
                reason = self._not_small(path, entry)
                if not reason and (
                    len(out) >= limits.MAX_FILES or total + entry.stat().st_size > limits.MAX_FILES_BYTES
                ):
                    reason = "over the limit of files, or of bytes in all files"
                if reason:
                    self.skipped.append((path, reason))
                    continue
                with open(entry.path, "rb") as file:
                    contents = file.read(limits.MAX_SMALL_FILE_BYTES + 1)
                if len(contents) > limits.MAX_SMALL_FILE_BYTES:
                    self.skipped.append((path, "grew during reading"))
                    continue
                out[path] = contents
                total += len(contents)
        return out

    def _not_small(self, path: str, entry: os.DirEntry[str]) -> str | None:
        if path.endswith(_OTHER_WEIGHTS):
            return "weights or training state in another format"
        fault = path_fault(path)
        if fault:
            return fault
        if entry.is_symlink():
            target = Path(entry.path).resolve()
            top = self.folder.resolve()
            # The Hugging Face cache keeps snapshots/<commit>/config.json as a link to ../../blobs/<hash>.
            if not target.is_relative_to(top) and target.parent != top.parent.parent / "blobs":
                return "a link that leaves the folder"
            if not target.exists():
                return "a dangling link"
        info = entry.stat()
        if not stat.S_ISREG(info.st_mode):
            return "not a regular file"
        if info.st_size > limits.MAX_SMALL_FILE_BYTES:
            return f"larger than {limits.MAX_SMALL_FILE_BYTES} bytes"
        return None


def _is_adapter(folder: Path) -> bool:
    """Whether PEFT saved an adapter in this folder. Links are not followed."""
    return not folder.name.startswith(".") and not folder.is_symlink() and (folder / WEIGHTS).is_file()


def _walk(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below the folder, sorted, as (relative path, entry), except hidden files, weights, and files that
    p2pcast itself writes.
    """
    pending = [""]
    while pending:
        prefix = pending.pop(0)
        with os.scandir(folder / prefix) as entries:
            found = sorted(entries, key=lambda e: e.name)
        for entry in found:
            path = f"{prefix}{entry.name}"
            if (
                entry.name.startswith(".")
                or path in {"STABLE", "p2pcast-anchor", INDEX}
                or path.endswith(".safetensors")
            ):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{path}/")
            else:
                yield path, entry


def write_folder(
    dst: Path | str,
    layout: Layout,
    words_of: Callable[[Cell], npt.NDArray[Any]],
    files: Mapping[str, bytes],
    *,
    workers: int = 1,
    before_rename: Callable[[], None] | None = None,
    sync_bytes: int | None = None,
    modes: disk.Modes = disk.PRIVATE,
) -> None:
    """Write a checkpoint folder, with canonical ``model.safetensors`` and the small files: durable and complete, or
    nothing.

    ``words_of`` is called for every cell, in order, on ``workers`` threads; each pending result takes a cell of memory.
    ``before_rename`` may reject the folder by raising. ``sync_bytes``: sync the weights each time this many bytes have
    been written, so that concurrent syncs never wait for all of them (default: once, at the end). Raises LocalError
    with file and reason, and the callables' exceptions.
    """
    for path in files:
        fault = path_fault(path)
        if fault:
            raise IntegrityError(f"small file {fault}")
    with atomic_folder(Path(dst), modes) as part:
        for path, contents in files.items():
            target = part / path
            with explained("write", target):
                disk.make_folder(target.parent, modes.folder)
                fd = disk.create(target, os.O_WRONLY | os.O_EXCL, modes.file)
                try:
                    disk.write(fd, target, contents)
                finally:
                    os.close(fd)
        weights = part / SINGLE
        with explained("write", weights):
            fd = disk.create(weights, os.O_WRONLY | os.O_EXCL, modes.file)
            try:
                disk.write(fd, weights, header_for(layout))
                unsynced = 0
                for words in ordered_map(words_of, layout.cells, workers=workers, name="write", nbytes=cell_bytes):
                    disk.write(fd, weights, words.data.cast("B"))
                    unsynced += words.nbytes
                    if sync_bytes is not None and unsynced >= sync_bytes:
                        disk.sync(fd, weights)
                        unsynced = 0
                written = os.lseek(fd, 0, os.SEEK_CUR)
            finally:
                os.close(fd)
            if written != len(header_for(layout)) + layout.nbytes:
                raise LocalError(f"{weights}: {written} bytes written, the layout has {layout.nbytes}")
        if before_rename is not None:
            before_rename()
