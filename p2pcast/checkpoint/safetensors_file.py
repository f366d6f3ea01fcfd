"""The safetensors format: parses and completely validates headers, and reads data.

Checks, in order:

- the file's size
- the header's size against its cap and the file
- UTF-8, and JSON without duplicate keys
- metadata, and the number of tensors
- for each tensor: name, dtype, shape and offsets
- that the tensors fill the data section exactly, without holes or overlaps
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.files.atomic_files import explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError

WORD_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_PREFIX_BYTES = 8
_ALIGNMENT = 8
READ_BYTES = limits.GIB
"""Bytes in one system call: below Linux's limit of 2 GiB."""


@dataclass(frozen=True, slots=True)
class Header:
    """``tensors``: each with its first byte in the data section, which begins at ``data_start`` (bytes)."""

    tensors: tuple[tuple[Tensor, int], ...]
    metadata: dict[str, str]
    data_start: int


def header_bytes(prefix: bytes, file_bytes: int, where: str) -> int:
    """Return the JSON header's size from the file's first 8 bytes. Raises IntegrityError."""
    if file_bytes < _PREFIX_BYTES or len(prefix) < _PREFIX_BYTES:
        raise IntegrityError(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    size = int.from_bytes(prefix[:_PREFIX_BYTES], "little")
    if size > limits.MAX_SAFETENSORS_HEADER_BYTES:
        raise IntegrityError(f"{where}: header of {size} bytes is over the format's limit; is this a safetensors file?")
    if size > file_bytes - _PREFIX_BYTES:
        raise IntegrityError(
            f"{where}: header of {size} bytes does not fit the file: the file is cut short, or not a safetensors file"
        )
    return size


def parse_header(text: bytes, file_bytes: int, where: str) -> Header:
    """Parse the JSON header of a file of ``file_bytes`` bytes. Raises IntegrityError naming the tensor or field."""
    if text[:1] != b"{":
        raise IntegrityError(f"{where}: header does not begin with '{{'")
    table = parse_json(text, f"{where}: header")
    if not isinstance(table, dict):
        raise IntegrityError(f"{where}: header is not an object")
    metadata = table.pop("__metadata__", None)
    if metadata is None:
        # Absent, or null as some tools write it: the library reads both as no metadata.
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise IntegrityError(f"{where}: __metadata__ is not a map from text to text")
    if len(table) > limits.MAX_TENSORS:
        raise IntegrityError(f"{where}: {len(table)} tensors, more than {limits.MAX_TENSORS}")
    data_bytes = file_bytes - _PREFIX_BYTES - len(text)
    found = [_tensor(name, entry, where) for name, entry in table.items()]
    at = 0
    for tensor, begin, end in sorted(found, key=lambda f: f[1:]):
        label = f"{where}: tensor {tensor.name[:80]!r}"
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise IntegrityError(f"{label} {kind}: begins at {begin}, expected {at}")
        if end - begin != tensor.nbytes:
            raise IntegrityError(
                f"{label}: {end - begin} bytes, but {tensor.dtype}{list(tensor.shape)} takes {tensor.nbytes}"
            )
        at = end
    if at != data_bytes:
        kind = "the file is cut short" if at > data_bytes else "bytes are left over at its end"
        raise IntegrityError(f"{where}: tensors take {at} bytes, the data section has {data_bytes}: {kind}")
    return Header(tuple((t, begin) for t, begin, _ in found), metadata, _PREFIX_BYTES + len(text))


def _tensor(name: str, entry: Any, where: str) -> tuple[Tensor, int, int]:
    label = f"{where}: tensor {name[:80]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise IntegrityError(f"{label}: needs dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise IntegrityError(f"{label}: dtype is not text")
    if not _naturals(shape) or len(shape) > limits.MAX_DIMS:
        raise IntegrityError(f"{label}: shape is not a list of at most {limits.MAX_DIMS} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise IntegrityError(f"{label}: data_offsets are not two ascending positions")
    try:
        tensor = Tensor(name, dtype, tuple(shape))
        tensor.check()
    except UnicodeEncodeError:
        raise IntegrityError(f"{label}: name is not Unicode text") from None
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from None
    return tensor, offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= limits.MAX_STATE_BYTES for x in value)


def parse_json(text: bytes, where: str) -> Any:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN. Raises IntegrityError."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise IntegrityError(f"{where}: a key appears twice in an object")
        return table

    def no_constants(name: str) -> None:
        raise IntegrityError(f"{where}: {name} is not JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=no_duplicates, parse_constant=no_constants)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not JSON ({type(error).__name__})") from None


def header_for(layout: Layout) -> bytes:
    """Return the canonical file's length prefix and header: tensors in canonical order without gaps, aligned to 8
    bytes.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


class SafetensorsFile:
    """One file, open for reading for this object's lifetime, even after the file is deleted.

    It is never mapped: if a different process truncated a mapped file, a read would kill this process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises LocalError if it cannot be read, and IntegrityError if it is damaged."""
        self.path = path
        with explained("read", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            self.nbytes = os.fstat(self._fd).st_size
            size = header_bytes(os.pread(self._fd, _PREFIX_BYTES, 0), self.nbytes, str(path))
            self.header = parse_header(os.pread(self._fd, size, _PREFIX_BYTES), self.nbytes, str(path))

    def read(self, into: npt.NDArray[np.uint8], begin: int) -> None:
        """Fill ``into`` with bytes of the data section from ``begin`` on. Raises LocalError, also on truncation."""
        at, left = self.header.data_start + begin, into.data
        with explained("read", self.path):
            while left:
                read = os.preadv(self._fd, [left[:READ_BYTES]], at)
                if not read:
                    raise LocalError(f"{self.path}: the file was cut short during reading: byte {at} is missing")
                at, left = at + read, left[read:]

    def words(self, word_bytes: int, begin: int, count: int) -> npt.NDArray[Any]:
        """Return ``count`` words from byte ``begin`` of the data section on, read-only, in new memory. Raises like
        ``read``.
        """
        room = np.empty(count * word_bytes, np.uint8)
        self.read(room, begin)
        return as_words(room, word_bytes)


def as_words(room: npt.NDArray[np.uint8], word_bytes: int) -> npt.NDArray[Any]:
    """Return a read-only view of bytes as words."""
    words: npt.NDArray[Any] = room.view(WORD_DTYPES[word_bytes])
    words.flags.writeable = False
    return words
