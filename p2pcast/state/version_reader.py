"""Reads a stored version's words, cell by cell, from a whole state and the deltas after it.

Every digest on the path is verified. Used to restore cells of a shadow, and to squash deltas that need the words before
them. Memory: two cells. Thread-safe.
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
from p2pcast.codec.squash_cell import Link
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.state.shadow import Shadow
from p2pcast.store.artifact_log import ArtifactLog

Words = npt.NDArray[Any]
WordsOf = Callable[[Cell], Words]


class WholeArtifact(Protocol):
    """A complete artifact on disk."""

    @property
    def assembly(self) -> Assembly: ...
    @property
    def log(self) -> ArtifactLog: ...


class DeltaChain:
    """Each cell's changes in consecutive deltas."""

    def __init__(self, deltas: Sequence[WholeArtifact]) -> None:
        self.deltas = deltas
        self._tables = [{placed.cell: placed for placed in d.assembly.directory} for d in deltas]

    def of(self, cell: Cell) -> list[Link]:
        """The cell's links, oldest first. Raises IntegrityError, LocalError."""
        found = [(d.log, table.get(cell.index)) for d, table in zip(self.deltas, self._tables, strict=True)]
        return [(p.codec, log.read(p.offset, p.bytes), p.before, p.after) for log, p in found if p is not None]


class VersionReader:
    def __init__(self, start: WordsOf, deltas: Sequence[WholeArtifact] = ()) -> None:
        """``start``: returns a cell's words before the first delta."""
        self.links = len(deltas)
        self._start = start
        self._links = DeltaChain(deltas)

    def words(self, cell: Cell) -> Words:
        """The cell's words after the last delta. Raises IntegrityError if a digest on the path does not match."""
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


def words_of_anchor(anchor: WholeArtifact) -> WordsOf:
    """Return a function that reads the words of a whole state."""
    table = {placed.cell: placed for placed in anchor.assembly.directory}

    def words(cell: Cell) -> Words:
        placed = table[cell.index]
        return np.frombuffer(anchor.log.read(placed.offset, placed.bytes), word_dtype(cell.word_bytes))

    return words


def way_to(version: Version, edges: Collection[Edge], base: Version | None = None) -> list[Edge] | None:
    """Return the path to a version with the fewest bytes, then the fewest artifacts; None if there is none.

    A path starts with a whole state from ``edges``, or at ``base``, the version held.
    """
    found = cheapest_path(None, edges, target=version)
    ways = [found] if found else []
    if base == version:
        return []
    if base is not None and (way := cheapest_path(base, edges, target=version)):
        ways.append(way)
    return min(ways, key=lambda way: (sum(edge.bytes for edge in way), len(way))) if ways else None


def reader_of_path(
    way: Sequence[Edge], wholes: Mapping[bytes, WholeArtifact], base: WordsOf | None = None
) -> VersionReader:
    """Return a reader of the path's last version. ``base``: reads the words of the path's base; not needed if the path
    starts with a whole state.
    """
    parts = [wholes[edge.artifact] for edge in way]
    if way and way[0].base is None:
        return VersionReader(words_of_anchor(parts[0]), parts[1:])
    assert base is not None
    return VersionReader(base, parts)


def replay_to(version: Version, kept: Iterable[WholeArtifact]) -> VersionReader | None:
    """Return a reader of ``version``, using a whole state in ``kept`` and the fewest deltas; None without a path."""
    by_id = {w.assembly.open.artifact: w for w in kept}
    way = way_to(version, [Edge(a, w.assembly.open.base, w.assembly.open.version, 1) for a, w in by_id.items()])
    return reader_of_path(way, by_id) if way else None


def restore_cells(shadow: Shadow, corrupt: Iterable[Cell], replay: VersionReader) -> list[tuple[Cell, P2PCastError]]:
    """Restore the cells reported by ``Shadow.verify`` from ``replay``, which must be at the shadow's version.

    Returns the cells that stay corrupt, with the error: their source is unreadable or does not match its signed digest.
    """
    left: list[tuple[Cell, P2PCastError]] = []
    for cell in corrupt:
        try:
            shadow.restore_cell(cell, replay.words(cell))
        except (IntegrityError, LocalError) as error:
            left.append((cell, error))
    return left
