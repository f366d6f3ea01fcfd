"""Parts of artifacts: the pieces that contain some cells and small files, and an estimate of their bytes before the
directory is here. Pure.

A directory is signed and names every piece's hash. A node with the directory can fetch any part of the artifact from
any other node without trusting that node.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.signed_records import HASH_BYTES
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground import limits
from p2pcast.relay.artifact_path import Edge

BATCH_BYTES = 160
"""Bytes of a signed batch without its hashes and entries."""
ENTRY_BYTES = 32
"""Bytes of a cell's directory entry, approximately."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The wanted parts of an artifact: cells by number, small files by hash."""

    cells: frozenset[int] = frozenset()
    files: frozenset[bytes] = frozenset()

    def pieces(self, assembly: Assembly) -> frozenset[int]:
        """The pieces that contain the wanted parts. The artifact's directory has to be complete."""
        assert assembly.manifest is not None
        spans = [(p.offset, p.bytes) for p in assembly.directory if p.cell in self.cells]
        spans += [(f.offset, f.size) for f in assembly.manifest.files if f.offset is not None and f.hash in self.files]
        return frozenset(piece for offset, size in spans for piece in assembly.pieces_of(offset, size))


def directory_bytes(size: int, piece: int, cells: int) -> int:
    """Bytes of the signed directory of an artifact: ``size`` and ``piece`` in bytes; ``cells``: number of cells."""
    pieces = -(-size // piece)
    return pieces * HASH_BYTES + -(-pieces // limits.BATCH_PIECES) * BATCH_BYTES + cells * ENTRY_BYTES


def expected_bytes(edge: Edge, cells: Collection[Cell], layout: Layout) -> int:
    """Bytes of the directory and of the pieces that contain ``cells``. Exact for an anchor. For a delta an estimate:
    each cell's share of ``edge.bytes``, and one piece more, of the size that a delta would be cut into today.
    """
    anchor = edge.base is None
    piece = piece_bytes(layout.nbytes if anchor else edge.bytes, anchor=anchor)
    whole = directory_bytes(edge.bytes, piece, len(layout.cells))
    if anchor:
        touched = {n for c in cells for n in range(c.offset // piece, -(-(c.offset + c.nbytes) // piece))}
        return whole + min(edge.bytes, len(touched) * piece)
    share = sum(cell.nbytes for cell in cells) / max(1, layout.nbytes)
    return whole + min(edge.bytes, int(edge.bytes * share) + len(cells) * piece)
