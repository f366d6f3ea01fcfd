"""The layout: which tensors the canonical state consists of, and how it is cut into cells.

Guarantee: two nodes with the same ``layout_id`` agree on every tensor's name, dtype, shape, number and byte offset, and
on every cell. Format and order: docs/formats/delta-format.md, section 1. Pure: no files, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import blake3
import msgpack

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError

# dtype -> (bytes per word, words per element); the size of packed sub-byte types is in bits.
_WORDS: dict[str, tuple[int, int]] = {
    "BOOL": (1, 1),
    "U8": (1, 1),
    "I8": (1, 1),
    "F8_E4M3": (1, 1),
    "F8_E5M2": (1, 1),
    "F8_E8M0": (1, 1),
    "F8_E4M3FNUZ": (1, 1),
    "F8_E5M2FNUZ": (1, 1),
    "BF16": (2, 1),
    "F16": (2, 1),
    "U16": (2, 1),
    "I16": (2, 1),
    "F32": (4, 1),
    "U32": (4, 1),
    "I32": (4, 1),
    "C64": (4, 2),
    "F64": (8, 1),
    "U64": (8, 1),
    "I64": (8, 1),
}
_PACKED_BITS: dict[str, int] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

DTYPES = frozenset(_WORDS) | frozenset(_PACKED_BITS)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint, with its safetensors dtype and its shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def word_bytes(self) -> int:
        return 1 if self.dtype in _PACKED_BITS else _WORDS[self.dtype][0]

    @property
    def words(self) -> int:
        bits = _PACKED_BITS.get(self.dtype)
        return self.elements * _WORDS[self.dtype][1] if bits is None else (self.elements * bits + 7) // 8

    @property
    def nbytes(self) -> int:
        return self.words * self.word_bytes

    def check(self) -> None:
        """Raise IntegrityError if name, dtype, shape or size is out of range."""
        where = f"tensor {self.name[:80]!r}"
        if len(self.name.encode()) > limits.MAX_NAME_BYTES:
            raise IntegrityError(f"{where}: name longer than {limits.MAX_NAME_BYTES} bytes")
        if self.dtype not in DTYPES:
            raise IntegrityError(f"{where}: dtype {self.dtype[:40]!r} is unknown to this p2pcast")
        if len(self.shape) > limits.MAX_DIMS or any(d < 0 or d > limits.MAX_STATE_BYTES for d in self.shape):
            raise IntegrityError(f"{where}: shape is out of range")
        if self.nbytes > limits.MAX_STATE_BYTES:
            raise IntegrityError(f"{where}: larger than {limits.MAX_STATE_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Cell:
    """A fixed range of one tensor's words.

    ``offset``: the cell's first byte in the canonical state. ``row_words``: the tensor's last dimension, 0 if it has no
    columns.
    """

    index: int
    tensor: int
    start: int
    words: int
    word_bytes: int
    offset: int
    row_words: int = 0

    @property
    def nbytes(self) -> int:
        return self.words * self.word_bytes


def cell_bytes(cell: Cell) -> int:
    return cell.nbytes


class Layout:
    """The ordered table of tensors and the cells cut from it. Immutable. Layouts with one ``layout_id`` are equal."""

    def __init__(
        self,
        tensors: Iterable[Tensor],
        *,
        cell_words: int = limits.CELL_WORDS,
        cuts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Tensors may be in any order. Raises IntegrityError for duplicates, unknown dtypes and sizes out of range."""
        found = list(tensors)
        if len(found) > limits.MAX_TENSORS:
            raise IntegrityError(f"layout has {len(found)} tensors, more than {limits.MAX_TENSORS}")
        for t in found:
            t.check()
        self.tensors: tuple[Tensor, ...] = tuple(sorted(found, key=lambda t: (-t.word_bytes, t.name.encode())))
        if len({t.name for t in found}) != len(found):
            raise IntegrityError("layout names a tensor twice")
        if not 1 <= cell_words <= limits.MAX_CELL_WORDS:
            raise IntegrityError(f"layout: cell of {cell_words} words is out of range")
        self.cell_words = cell_words
        self.cuts: dict[int, tuple[int, ...]] = {t: tuple(c) for t, c in sorted((cuts or {}).items()) if c}
        offsets = [0]
        for t in self.tensors:
            offsets.append(offsets[-1] + t.nbytes)
        if offsets[-1] > limits.MAX_STATE_BYTES:
            raise IntegrityError(f"layout: state larger than {limits.MAX_STATE_BYTES} bytes")
        self.offsets: tuple[int, ...] = tuple(offsets[:-1])
        self.nbytes: int = offsets[-1]
        for number, positions in self.cuts.items():
            if not 0 <= number < len(self.tensors):
                raise IntegrityError(f"layout: a cut names tensor {number}, which does not exist")
            words = self.tensors[number].words
            if list(positions) != sorted(set(positions)) or positions[0] < 1 or positions[-1] >= words:
                raise IntegrityError(
                    f"layout: cuts of tensor {self.tensors[number].name!r} are not ascending inside it"
                )

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        out: list[Cell] = []
        for number, (tensor, offset) in enumerate(zip(self.tensors, self.offsets, strict=True)):
            words, width = tensor.words, tensor.word_bytes
            row = tensor.shape[-1] if len(tensor.shape) > 1 and words == tensor.elements else 0
            cuts = self.cuts.get(number, ())
            start = 0
            while start < words:
                end = min((start // self.cell_words + 1) * self.cell_words, words)
                at = bisect_right(cuts, start)
                if at < len(cuts):
                    end = min(end, cuts[at])
                out.append(Cell(len(out), number, start, end - start, width, offset + start * width, row))
                start = end
        return tuple(out)

    @cached_property
    def document(self) -> bytes:
        """The layout document (canonical msgpack)."""
        body: dict[str, Any] = {
            "cell": self.cell_words,
            "cuts": [[t, list(c)] for t, c in self.cuts.items()],
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "v": 1,
        }
        packed: bytes = msgpack.packb(body)
        return packed

    @cached_property
    def layout_id(self) -> bytes:
        return blake3.blake3(self.document).digest()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Tensor name -> number."""
        return {t.name: n for n, t in enumerate(self.tensors)}

    @property
    def params(self) -> int:
        """Number of elements in the whole state."""
        return sum(t.elements for t in self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and other.layout_id == self.layout_id

    def __hash__(self) -> int:
        return hash(self.layout_id)

    @classmethod
    def from_document(cls, document: bytes, layout_id: bytes | None = None) -> Layout:
        """Parse a layout document. Raises IntegrityError if it is malformed or does not match ``layout_id``."""
        if len(document) > limits.MAX_LAYOUT_BYTES:
            raise IntegrityError(
                f"layout document of {len(document)} bytes is over the limit of {limits.MAX_LAYOUT_BYTES}"
            )
        if layout_id is not None and blake3.blake3(document).digest() != layout_id:
            raise IntegrityError("layout document does not match its layout_id")
        try:
            body = msgpack.unpackb(document)
            if body["v"] != 1:
                raise IntegrityError(f"layout document has version {body['v']!r}; this p2pcast reads version 1")
            tensors = [Tensor(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in body["tensors"]]
            cuts = {int(t): tuple(int(x) for x in c) for t, c in body["cuts"]}
            layout = cls(tensors, cell_words=int(body["cell"]), cuts=cuts)
        except IntegrityError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
            raise IntegrityError(f"layout document is malformed: {error}") from None
        if layout.document != document:
            raise IntegrityError("layout document is not in canonical form")
        return layout

    def difference(self, other: Layout) -> list[str]:
        """Return one line for each tensor that differs between the two layouts, for error messages."""
        mine = {t.name: t for t in self.tensors}
        theirs = {t.name: t for t in other.tensors}
        lines = [f"missing: {n}" for n in mine if n not in theirs] + [
            f"unexpected: {n}" for n in theirs if n not in mine
        ]
        lines += [
            f"{n}: {t.dtype}{list(t.shape)} became {theirs[n].dtype}{list(theirs[n].shape)}"
            for n, t in mine.items()
            if n in theirs and theirs[n] != t
        ]
        return lines
