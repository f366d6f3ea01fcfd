"""One artifact in a node: its signed directory, and the pieces whose hash matched. Pure."""

from __future__ import annotations

from enum import Enum

import blake3

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import Open


class PieceOffer(Enum):
    """The outcome of checking one piece."""

    NEW = "new"
    DUPLICATE = "duplicate"
    UNVOUCHED = "no batch vouches for it"
    CORRUPT = "its hash differs from the batch's"


class VerifiedPieces:
    def __init__(self, assembly: Assembly, held: PieceSet | None = None) -> None:
        self.assembly = assembly
        self.held = held or PieceSet()
        self.id: bytes = assembly.open.artifact

    @property
    def open(self) -> Open:
        return self.assembly.open

    @property
    def complete(self) -> bool:
        """Whether the manifest, every batch and every piece are here."""
        return self.assembly.complete_directory and self.held.count == self.assembly.pieces

    def offer(self, index: int, payload: memoryview) -> PieceOffer:
        """Check a piece against the hash from its batch, and note a match as held."""
        if index in self.held:
            return PieceOffer.DUPLICATE
        expected = self.assembly.piece_hash(index)
        if expected is None:
            return PieceOffer.UNVOUCHED
        if blake3.blake3(payload).digest() != expected:
            return PieceOffer.CORRUPT
        self.held.add(index)
        return PieceOffer.NEW
