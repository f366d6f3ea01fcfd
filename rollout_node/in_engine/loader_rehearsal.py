"""Runs a model's own loader on a tensor's values and compares each write with the weight in place.

Guarantee: no weight is written. Memory: the loader's own values plus ``INSTALL_CHUNK_BYTES``. The comparison is
bitwise. There is no verdict if the loader's writes cannot be judged one by one, because it computes in place or writes
twice to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from p2pcast.ground import limits

WORDS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for bitwise comparison and copies, by width in bytes."""


class StorageSpan(NamedTuple):
    """The byte range of a storage (given by device and address) that a strided view covers."""

    device: str
    storage: int
    low: int
    high: int

    @classmethod
    def of(cls, view: torch.Tensor) -> StorageSpan:
        steps = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        low, size = view.storage_offset(), view.element_size()
        high = low + steps + 1 if view.numel() else low
        return cls(str(view.device), view.untyped_storage().data_ptr(), low * size, high * size)

    def meets(self, other: StorageSpan) -> bool:
        """Whether the two spans may share a byte."""
        return self[:2] == other[:2] and max(self.low, other.low) < min(self.high, other.high)


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors to which an operator writes, given its arguments."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            found += [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    return found


class LoaderVerdict(IntEnum):
    """``UNKNOWN``: the loader's writes cannot be judged. ``UNTOUCHED``: it wrote nothing on this rank.

    The values are negative, so that a verdict is never confused with an element's number.
    """

    EQUAL = -1
    DIFFERS = -2
    UNKNOWN = -3
    UNTOUCHED = -4


class _Rehearsal(TorchDispatchMode):  # type: ignore[misc]
    """Compares values that would be written to the model's storages with those already there."""

    def __init__(self, owns: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.spans: list[StorageSpan] = []
        self.differs = self.unknown = False
        self._owns = owns

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        targets = [t for t in written_tensors(func, args, kwargs) if self._owns(t)]
        if not targets:
            return func(*args, **kwargs)
        self.spans += map(StorageSpan.of, targets)
        if func is aten.copy_.default:
            self.differs |= not _equal_bits(args[0], args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self.differs |= not _equal_bits(
                args[0], torch.full((), args[1] if len(args) > 1 else 0, dtype=args[0].dtype)
            )
        else:
            self.unknown = True
        return targets[0]

    @property
    def verdict(self) -> LoaderVerdict:
        if not self.spans:
            return LoaderVerdict.UNTOUCHED
        ordered = sorted(self.spans)
        if self.unknown or any(a.meets(b) for a, b in pairwise(ordered)):
            return LoaderVerdict.UNKNOWN
        return LoaderVerdict.DIFFERS if self.differs else LoaderVerdict.EQUAL


def _equal_bits(live: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether ``live.copy_(source)`` would change no bit."""
    if not live.numel():
        return True
    words = WORDS[live.element_size()]
    source = source.expand(live.shape)
    if not live.ndim:
        live, source = live.reshape(1), source.reshape(1)
    rows = max(1, limits.INSTALL_CHUNK_BYTES // (live.element_size() * live[0].numel()))
    for a, b in zip(live.split(rows), source.split(rows), strict=True):
        there = b.to(device=live.device, dtype=live.dtype).contiguous().view(words)
        if not torch.equal(a.contiguous().view(words), there):
            return False
    return True


def rehearse(
    model: Any, owns: Callable[[torch.Tensor], bool], name: str, tensor: torch.Tensor
) -> tuple[LoaderVerdict, list[StorageSpan]]:
    """Return whether loading ``tensor`` under ``name`` would leave the weights unchanged, and the spans that it would
    write.

    ``owns`` recognises tensors in the model's storages.
    """
    rehearsal = _Rehearsal(owns)
    try:
        with torch.inference_mode(), rehearsal:
            model.load_weights([(name, tensor)])
    except Exception:  # noqa: BLE001 - loaders raise arbitrary errors; the verdict is then unknown
        return LoaderVerdict.UNKNOWN, rehearsal.spans
    return rehearsal.verdict, rehearsal.spans
