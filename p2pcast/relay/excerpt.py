"""Parts of artifacts: the pieces in which some of its cells and small files lie, and what they should weigh before the directory is here. Pure.

A directory is signed, and with it every piece's hash: whoever has it can have any part of an artifact from anybody, and needs to trust nobody for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2pcast import limits
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.records import HASH_BYTES
from p2pcast.codec.layout import Cell, Layout
from p2pcast.relay.catchup import Edge

BATCH_BYTES = 160
"""Of a signed batch, beside hashes and entries."""
ENTRY_BYTES = 32
"""Of a cell's directory entry, about."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What is wanted of an artifact: cells, by number, and small files, by hash."""

    cells: frozenset[int] = frozenset()
    files: frozenset[bytes] = frozenset()

    def pieces(self, assembly: Assembly) -> frozenset[int]:
        """Where that lies, as far as the artifact has it; its directory has to be complete."""
        assert assembly.manifest is not None
        spans = [(p.offset, p.bytes) for p in assembly.directory if p.cell in self.cells]
        spans += [(f.offset, f.size) for f in assembly.manifest.files if f.offset is not None and f.hash in self.files]
        return frozenset(piece for offset, size in spans for piece in assembly.pieces_of(offset, size))


def directory_bytes(size: int, piece: int, cells: int) -> int:
    """Of the signed directory of an artifact of ``size`` bytes, in pieces of ``piece``, of a state of ``cells``."""
    pieces = -(-size // piece)
    return pieces * HASH_BYTES + -(-pieces // limits.BATCH_PIECES) * BATCH_BYTES + cells * ENTRY_BYTES


def expected_bytes(edge: Edge, cells: Collection[Cell], layout: Layout) -> int:
    """Of the directory and the pieces in which ``cells`` lie, of an artifact of ``edge.bytes``. Of an anchor that is exact; in a delta each cell is taken for
    its share of the whole, and a piece more, of the size for which it would be cut today."""
    anchor = edge.base is None
    piece = piece_bytes(layout.nbytes if anchor else edge.bytes, anchor=anchor)
    whole = directory_bytes(edge.bytes, piece, len(layout.cells))
    if anchor:
        touched = {n for c in cells for n in range(c.offset // piece, -(-(c.offset + c.nbytes) // piece))}
        return whole + min(edge.bytes, len(touched) * piece)
    share = sum(cell.nbytes for cell in cells) / max(1, layout.nbytes)
    return whole + min(edge.bytes, int(edge.bytes * share) + len(cells) * piece)
