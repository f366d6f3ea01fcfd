"""A checkpoint folder seen through a quantiser: the tensors that a quantised engine loads, computed as they are read.

Guarantee: nothing is written, and each reading thread has at most one cell's rows in memory. Scales need a second read
of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.safetensors_file import as_words
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.quantised.quantisation_kinds import QuantisationKind, Role
from p2pcast.quantised.quantised_layout import QuantisedLayout
from p2pcast.quantised.quantisers import as_weights, quantise

Words = npt.NDArray[Any]
_CHUNK_ELEMENTS: Final = limits.CELL_WORDS
"""Number of weights quantised at once to compute their scales."""


class QuantisedCheckpoint(Checkpoint):
    """The ``Checkpoint`` of the quantised state. Thread-safe."""

    def __init__(self, plain: Checkpoint, kind: QuantisationKind) -> None:
        """Raises IntegrityError if no tensor can be quantised."""
        super().__init__(plain.folder, plain.files, plain.adapters)
        self._plain = plain
        try:
            self._form = QuantisedLayout(plain.layout(), kind)
        except IntegrityError as error:
            raise IntegrityError(f"{plain.folder}: {error}") from None

    def layout(self, *, cell_words: int = limits.CELL_WORDS, cuts: Mapping[int, Sequence[int]] | None = None) -> Layout:
        if cell_words == self._form.layout.cell_words and not cuts:
            return self._form.layout
        return Layout(self._form.layout.tensors, cell_words=cell_words, cuts=cuts)

    def words(self, cell: Cell) -> Words:
        """Return a cell's words. Raises like ``Checkpoint.words``, and IntegrityError for values without a code."""
        return quantised_words(self._form, cell, self._rows)

    def lent(self, cell: Cell) -> Words:
        origin = self._form.origins[cell.tensor]
        if origin.role is Role.COPY:
            return self._plain.lent(_elements(self._form, origin.source, cell.start, cell.words))
        return self.words(cell)

    def small_files(self) -> dict[str, bytes]:
        files = self._plain.small_files()
        self.skipped = self._plain.skipped
        return self._form.files(files)

    def _rows(self, source: int, start: int, words: int) -> Words:
        return self._plain.words(_elements(self._form, source, start, words))


def quantised_words(form: QuantisedLayout, cell: Cell, read: Callable[[int, int, int], Words]) -> Words:
    """Return a cell of the quantised state. ``read(number, start, words)`` returns words of a plain state's tensor.

    Raises IntegrityError, and whatever ``read`` raises.
    """
    origin = form.origins[cell.tensor]
    if origin.role is Role.COPY:
        return read(origin.source, cell.start, cell.words)
    kind, weight = form.kind, form.plain.tensors[origin.source]
    rows, columns = weight.shape
    begin, end = cell.start * cell.word_bytes, (cell.start + cell.words) * cell.word_bytes
    if origin.role is Role.SHAPE:
        return as_words(np.array(weight.shape, "<i8").view(np.uint8)[begin:end], cell.word_bytes)
    if origin.role is Role.CODES:
        # One byte per weight, in the weight's order.
        first = begin // columns // kind.rows * kind.rows
        last = min(rows, -(-end // (columns * kind.rows)) * kind.rows)
        codes, _ = next(quantised_bands(form, origin.source, first, last, read, most=None))
        return as_words(codes[begin - first * columns : end - first * columns], cell.word_bytes)
    bands, across = kind.scale_shape(rows, columns)
    low = cell.start // across
    high = min(bands, -(-(cell.start + cell.words) // across))
    found = [
        scales
        for _, scales in quantised_bands(
            form, origin.source, low * kind.rows, min(rows, high * kind.rows), read, most=_CHUNK_ELEMENTS
        )
    ]
    at = begin - low * across * cell.word_bytes
    return as_words(np.concatenate(found)[at : at + cell.nbytes], cell.word_bytes)


def quantised_bands(
    form: QuantisedLayout,
    source: int,
    first: int,
    last: int,
    read: Callable[[int, int, int], Words],
    *,
    most: int | None,
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Yield (codes, scales) of rows ``first`` to ``last``, in whole bands of about ``most`` weights at a time."""
    weight = form.plain.tensors[source]
    columns, step = weight.shape[1], last - first
    if most is not None:
        step = max(1, most // columns // form.kind.rows) * form.kind.rows
    for row in range(first, last, step):
        count = min(step, last - row)
        weights = as_weights(read(source, row * columns, count * columns), weight)
        yield quantise(form.kind, weights, weight.name, row)


def _elements(form: QuantisedLayout, source: int, start: int, words: int) -> Cell:
    """Return words of a plain tensor as a separate cell."""
    width = form.plain.tensors[source].word_bytes
    return Cell(0, source, start, words, width, form.plain.offsets[source] + start * width)
