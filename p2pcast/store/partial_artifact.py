"""Resumes artifacts that an earlier process received in part: finds them and verifies them piece by piece.

Guarantees: a piece counts as held only if it matches its signed hash; artifacts that cannot be resumed are removed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import blake3

from p2pcast.artifact.artifact_file import HEADER
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import ANCHOR
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground.ordered_map import ordered_map
from p2pcast.store import artifact_journal
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.artifact_journal import ArtifactJournal
from p2pcast.store.artifact_log import ArtifactLog, FileLog


@dataclass(frozen=True, slots=True)
class PartialArtifact:
    """A resumed artifact. ``held``: the complete, verified pieces in the log."""

    assembly: Assembly
    log: ArtifactLog
    held: PieceSet


def resume(folder: Path, run_key: bytes, known: Container[bytes], workers: int) -> list[PartialArtifact]:
    """Return all partial artifacts in ``folder``, except those in ``known``, which are stored. Raises LocalError."""
    found: list[PartialArtifact] = []
    for path in sorted(folder.glob(f"*{artifact_journal.SUFFIX}")):
        part = path.with_name(path.name.removesuffix(artifact_journal.SUFFIX))
        assembly = artifact_journal.recover(path, run_key)
        anchor = assembly is not None and assembly.open.kind == ANCHOR
        if (
            assembly is None
            or assembly.open.artifact in known
            or assembly.open.artifact.hex() != part.name
            or part.is_dir() != anchor
        ):
            with explained("clean", path):
                disk.remove(part)
                disk.remove(path)
            continue
        notes = ArtifactJournal(path, None)
        log: ArtifactLog
        if anchor:
            log = AnchorLog(part, assembly.layout, create=True, journal=notes, resumed=True)
        else:
            log = FileLog(part, len(HEADER), head=HEADER, journal=notes, resumed=True)
        found.append(PartialArtifact(assembly, log, _good_pieces(log, assembly, workers)))
    return found


def _good_pieces(log: ArtifactLog, assembly: Assembly, workers: int) -> PieceSet:
    """Return the pieces in the log that match their signed hashes."""
    piece = assembly.open.piece

    def good(index: int) -> bool:
        size = assembly.piece_bytes(index)
        # Before the seal, the last piece's length is unknown, so a short last piece is fetched again.
        data = log.read(index * piece, piece if size is None else size, short=True)
        return blake3.blake3(data).digest() == assembly.piece_hash(index)

    held = PieceSet()
    vouched = [index for index in range(assembly.pieces) if assembly.piece_hash(index) is not None]
    checked = ordered_map(good, vouched, workers=workers, name="resume", nbytes=lambda _: piece)
    for index, fine in zip(vouched, checked, strict=True):
        if fine:
            held.add(index)
    return held
