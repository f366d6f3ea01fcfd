"""Excerpts of artifacts: which pieces contain some cells and small files, and an estimate of their size before the
directory has been received. Pure.

A directory is signed and contains every piece's hash. So a node with the directory can fetch any part of the artifact
from any node without trusting it.
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
"""Size in bytes of a signed batch without its hashes and entries."""
ENTRY_BYTES = 32
"""Approximate size in bytes of a cell's directory entry."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The wanted parts of an artifact: cells by number, small files by hash."""

    cells: frozenset[int] = frozenset()
    files: frozenset[bytes] = frozenset()

    def pieces(self, assembly: Assembly) -> frozenset[int]:
        """Return the pieces that contain the wanted parts. The artifact's directory must be complete."""
        assert assembly.manifest is not None
        spans = [(p.offset, p.bytes) for p in assembly.directory if p.cell in self.cells]
        spans += [(f.offset, f.size) for f in assembly.manifest.files if f.offset is not None and f.hash in self.files]
        return frozenset(piece for offset, size in spans for piece in assembly.pieces_of(offset, size))


def directory_bytes(size: int, piece: int, cells: int) -> int:
    """Return the size of an artifact's signed directory. ``size``, ``piece``: in bytes; ``cells``: their number."""
    pieces = -(-size // piece)
    return pieces * HASH_BYTES + -(-pieces // limits.BATCH_PIECES) * BATCH_BYTES + cells * ENTRY_BYTES


def expected_bytes(edge: Edge, cells: Collection[Cell], layout: Layout) -> int:
    """Return the bytes of the pieces that contain ``cells``, and of the directory. For a delta the pieces are an
    estimate: each cell's share of ``edge.bytes``, and one more piece of the size into which a delta would be cut today.
    """
    anchor = edge.base is None
    piece = piece_bytes(layout.nbytes if anchor else edge.bytes, anchor=anchor)
    whole = directory_bytes(edge.bytes, piece, len(layout.cells))
    if anchor:
        touched = {n for c in cells for n in range(c.offset // piece, -(-(c.offset + c.nbytes) // piece))}
        return whole + min(edge.bytes, len(touched) * piece)
    share = sum(cell.nbytes for cell in cells) / max(1, layout.nbytes)
    return whole + min(edge.bytes, int(edge.bytes * share) + len(cells) * piece)
