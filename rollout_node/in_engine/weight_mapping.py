"""Where a checkpoint's elements are in an engine's fused and sharded parameters.

Guarantee: positions in a checkpoint tensor are converted to positions in the engine's storages by arithmetic only.
Memory is O(blocks), about five per layer, whatever the number of parameters. It uses numpy without torch, and no I/O.

A *block* maps a box of a checkpoint tensor to a strided view of one storage, as a weight loader's ``copy_`` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
_MAX_U32 = (1 << 32) - 1


class NotABoxError(ValueError):
    """The source view is not a box of the tensor: elements repeat, or the strides do not determine their order."""


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """Elements ``start + Σ cᵢ·from_strideᵢ`` of the checkpoint tensor are at ``at + Σ cᵢ·to_strideᵢ`` in the storage.

    All values count elements. Source strides descend and nest: a step in one dimension is longer than the extent of all
    later dimensions. So every element has one coordinate, and elements ascend in row-major order.
    """

    start: int
    shape: tuple[int, ...]
    from_stride: tuple[int, ...]
    storage: int
    at: int
    to_stride: tuple[int, ...]

    @classmethod
    def of(
        cls,
        start: int,
        shape: Sequence[int],
        from_stride: Sequence[int],
        storage: int,
        at: int,
        to_stride: Sequence[int],
    ) -> StridedBlock:
        """Return the block in the class's form, with as few dimensions as possible. Raises NotABoxError."""
        dims = [(n, s, t) for n, s, t in zip(shape, from_stride, to_stride, strict=True) if n != 1]
        dims.sort(key=lambda dim: -dim[1])
        merged: list[tuple[int, int, int]] = []
        for n, s, t in dims:
            if merged and merged[-1][1] == n * s and merged[-1][2] == n * t:
                merged[-1] = (merged[-1][0] * n, s, t)
            else:
                merged.append((n, s, t))
        inner = 0
        for n, s, _ in reversed(merged):
            if s <= inner:
                raise NotABoxError("strides of the source overlap")
            inner += (n - 1) * s
        unzipped = [tuple(dim[i] for dim in merged) for i in range(3)]
        return cls(start, unzipped[0], unzipped[1], storage, at, unzipped[2])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element of the checkpoint tensor that may be in this block."""
        return self.start + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.from_stride, strict=True))

    def locate(
        self, positions: npt.NDArray[np.uint32], first: int = 0
    ) -> tuple[slice | npt.NDArray[np.intp], Positions]:
        """Return the indices of those ascending ``positions``, counted from ``first``, that are in this block, and
        their positions in the storage.
        """
        bounds = np.clip((self.start - first, self.end - first), 0, _MAX_U32).astype(
            np.uint32
        )  # same dtype as the positions, which avoids a copy
        low, high = np.searchsorted(positions, bounds)
        rest = positions[low:high].astype(np.int64)
        rest += first - self.start
        where = np.full(len(rest), self.at, np.int64)
        inside: npt.NDArray[np.bool_] | None = None
        for number, (n, s, t) in enumerate(zip(self.shape, self.from_stride, self.to_stride, strict=True)):
            if s == 1:
                steps, rest = rest, np.zeros(0, np.int64)
            else:
                steps, rest = np.divmod(rest, s)
            if number:  # the search above already bounds the first dimension
                fits = steps < n
                inside = fits if inside is None else inside & fits
            where += steps * t
        if len(rest) and self.shape and self.from_stride[-1] != 1:
            fits = rest == 0
            inside = fits if inside is None else inside & fits
        if inside is None or bool(inside.all()):
            return slice(int(low), int(high)), where
        chosen = np.flatnonzero(inside)
        return chosen + low, where[chosen]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first element of the checkpoint tensor, length) of every contiguous run, in ascending order."""
        contiguous = bool(self.shape) and self.from_stride[-1] == 1
        outer = self.shape[:-1] if contiguous else self.shape
        length = self.shape[-1] if contiguous else 1
        for step in np.ndindex(*outer):
            yield self.start + sum(c * s for c, s in zip(step, self.from_stride, strict=False)), length

    def split(self, most: int) -> Iterator[StridedBlock]:
        """Yield blocks of at most ``most`` elements that make up this one."""
        if self.elements <= most:
            yield self
            return
        n, inner = self.shape[0], self.elements // self.shape[0]
        step = max(1, most // inner)
        for c in range(0, n, step):
            part = StridedBlock.of(
                self.start + c * self.from_stride[0],
                (min(step, n - c), *self.shape[1:]),
                self.from_stride,
                self.storage,
                self.at + c * self.to_stride[0],
                self.to_stride,
            )
            yield from part.split(most)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A model's blocks by tensor number. ``reload``: the tensors whose loader transforms values, with the reason.

    This rank does not use a tensor that is in neither (for example, one of a different pipeline stage). ``twins``: see
    ``tensor_accounts.twins``.
    """

    blocks: dict[int, tuple[StridedBlock, ...]]
    reload: dict[int, str]
    twins: dict[int, int] = field(default_factory=dict)
