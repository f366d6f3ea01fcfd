"""The words of a version that is kept, cell by cell: from a whole state and the deltas behind it. Every digest on the way is checked.

For healing cells of a shadow, and for squashing deltas that are read with the words before them. Memory: two cells. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pcast.artifact.assembly import Assembly
from p2pcast.codec.cell import apply, decode
from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.codec.squash import Link
from p2pcast.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.state.shadow import Shadow
from p2pcast.store.log import Log
from p2pcast.version import Version

Words = npt.NDArray[Any]
WordsOf = Callable[[Cell], Words]


class Whole(Protocol):
    """An artifact that lies whole on disk."""

    @property
    def assembly(self) -> Assembly: ...
    @property
    def log(self) -> Log: ...


class Links:
    """What a row of consecutive deltas does to each cell."""

    def __init__(self, deltas: Sequence[Whole]) -> None:
        self.deltas = deltas
        self._tables = [{placed.cell: placed for placed in d.assembly.directory} for d in deltas]

    def of(self, cell: Cell) -> list[Link]:
        """Oldest first. Raises IntegrityError, LocalError."""
        found = [(d.log, table.get(cell.index)) for d, table in zip(self.deltas, self._tables, strict=True)]
        return [(p.codec, log.read(p.offset, p.bytes), p.before, p.after) for log, p in found if p is not None]


class Replay:
    def __init__(self, start: WordsOf, deltas: Sequence[Whole] = ()) -> None:
        """``start``: the words before the first delta."""
        self.links = len(deltas)
        self._start = start
        self._links = Links(deltas)

    def words(self, cell: Cell) -> Words:
        """After the last delta. Raises IntegrityError where something on the way is not what it should be."""
        words = self._start(cell)
        for number, (codec, payload, before, after) in enumerate(self._links.of(cell)):
            patch = decode(cell, codec, payload, words, before, after, check_before=number == 0)
            if patch.positions is None:
                words = patch.words
                continue
            if not words.flags.writeable or number == 0:
                words = words.copy()
            apply(patch, words)
        return words


def of_anchor(anchor: Whole) -> WordsOf:
    """The words of a whole state."""
    table = {placed.cell: placed for placed in anchor.assembly.directory}

    def words(cell: Cell) -> Words:
        placed = table[cell.index]
        return np.frombuffer(anchor.log.read(placed.offset, placed.bytes), word_dtype(cell.word_bytes))

    return words


def way_to(version: Version, edges: Collection[Edge], base: Version | None = None) -> list[Edge] | None:
    """The way of the fewest bytes, and then artifacts, to a version from a whole state among ``edges``, or from ``base``, which is held; None where there is none."""
    found = cheapest_path(None, edges, target=version)
    ways = [found] if found else []
    if base == version:
        return []
    if base is not None and (way := cheapest_path(base, edges, target=version)):
        ways.append(way)
    return min(ways, key=lambda way: (sum(edge.bytes for edge in way), len(way))) if ways else None


def along(way: Sequence[Edge], wholes: Mapping[bytes, Whole], base: WordsOf | None = None) -> Replay:
    """``base``: where the way begins, unless it begins with a whole state."""
    parts = [wholes[edge.artifact] for edge in way]
    if way and way[0].base is None:
        return Replay(of_anchor(parts[0]), parts[1:])
    assert base is not None
    return Replay(base, parts)


def replay_to(version: Version, kept: Iterable[Whole]) -> Replay | None:
    """By the fewest deltas from a whole state among ``kept``; None where nothing leads to the version."""
    by_id = {w.assembly.open.artifact: w for w in kept}
    way = way_to(version, [Edge(a, w.assembly.open.base, w.assembly.open.version, 1) for a, w in by_id.items()])
    return along(way, by_id) if way else None


def heal(shadow: Shadow, rotten: Iterable[Cell], replay: Replay) -> list[tuple[Cell, P2PCastError]]:
    """Put right what ``Shadow.verify`` found, from ``replay`` to the shadow's version; the cells that stay as they are, since what they come from cannot be
    read or is not what was signed."""
    left: list[tuple[Cell, P2PCastError]] = []
    for cell in rotten:
        try:
            shadow.heal(cell, replay.words(cell))
        except (IntegrityError, LocalError) as error:
            left.append((cell, error))
    return left
