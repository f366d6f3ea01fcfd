"""A set of piece numbers: which pieces of an artifact a node has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError


def ranges_of(indices: Iterable[int]) -> list[int]:
    """Return ascending piece numbers as ranges ``[from, to, …]``."""
    out: list[int] = []
    for index in indices:
        if out and out[-1] == index:
            out[-1] += 1
        else:
            out += (index, index + 1)
    return out


def indices_of(ranges: Sequence[int], most: int) -> list[int]:
    """Return the first ``most`` piece numbers in these ranges."""
    spans = zip(ranges[::2], ranges[1::2], strict=True)
    return list(chain.from_iterable(range(a, min(b, a + most)) for a, b in spans))[:most]


class PieceSet:
    """A set that only grows. ``prefix``: the number of pieces before the first gap; decoding may go that far."""

    __slots__ = ("_flags", "count", "prefix")

    def __init__(self, held: int = 0) -> None:
        """Start with the first ``held`` pieces."""
        self._flags = bytearray(b"\1") * held
        self.count = held
        self.prefix = held

    def copy(self) -> PieceSet:
        """Return an independent set of the same pieces."""
        other = PieceSet()
        other._flags, other.count, other.prefix = bytearray(self._flags), self.count, self.prefix
        return other

    def __contains__(self, index: int) -> bool:
        return index < len(self._flags) and self._flags[index] == 1

    def add(self, index: int) -> bool:
        """Add a piece and return whether it is new. Raises RemoteError if its number is out of range."""
        flags = self._flags
        if index >= len(flags):
            if index >= limits.MAX_PIECES:
                raise RemoteError(f"piece {index} is out of range")
            flags.extend(bytes(max(index + 1 - len(flags), min(len(flags), 1 << 16), 64)))
        if flags[index]:
            return False
        flags[index] = 1
        self.count += 1
        if index == self.prefix:
            at = flags.find(0, index)
            self.prefix = at if at >= 0 else len(flags)
        return True

    def ranges(self) -> list[int]:
        """Return the ``[from, to, …]`` list that HAVE carries (docs/formats/wire-protocol.md, section 5)."""
        out: list[int] = []
        at = 0
        while (start := self._flags.find(1, at)) >= 0:
            end = self._flags.find(0, start)
            end = len(self._flags) if end < 0 else end
            out += (start, end)
            at = end
        return out[: limits.MAX_RANGES]

    def lacking(self, have: Sequence[int]) -> Iterator[int]:
        """Yield the pieces of this set that are not in the ranges ``have``, in ascending order."""
        start = 0
        for begin, end in [*zip(have[::2], have[1::2], strict=True), (len(self._flags), 0)]:
            at = start
            while at < begin and (at := self._flags.find(1, at, begin)) >= 0:
                yield at
                at += 1
            start = max(start, end)
