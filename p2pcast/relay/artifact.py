"""What a node knows of one artifact: its signed directory and which pieces it holds. Pure."""

from __future__ import annotations

from enum import Enum

import blake3

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.records import Open
from p2pcast.relay.pieces import PieceSet


class Offer(Enum):
    """What became of a piece that was offered."""

    NEW = "new"
    DUPLICATE = "duplicate"
    UNVOUCHED = "no batch speaks of it"
    CORRUPT = "its hash is not the batch's"


class Artifact:
    def __init__(self, assembly: Assembly, held: PieceSet | None = None) -> None:
        self.assembly = assembly
        self.held = held or PieceSet()
        self.id: bytes = assembly.open.artifact

    @property
    def open(self) -> Open:
        return self.assembly.open

    @property
    def complete(self) -> bool:
        """Sealed, and every batch and piece is here."""
        return self.assembly.complete_directory and self.held.count == self.assembly.pieces

    def offer(self, index: int, payload: memoryview) -> Offer:
        """Check a piece against the hash that a batch gave, and note it as held."""
        if index in self.held:
            return Offer.DUPLICATE
        expected = self.assembly.piece_hash(index)
        if expected is None:
            return Offer.UNVOUCHED
        if blake3.blake3(payload).digest() != expected:
            return Offer.CORRUPT
        self.held.add(index)
        return Offer.NEW
