"""What an earlier process received of an artifact, and was not to see whole: found again, and read piece by piece.

Promise: what is taken for held has the hash that was signed; what nobody can go on with is removed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import blake3

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.p2pd import HEADER
from p2pcast.artifact.records import ANCHOR
from p2pcast.parallel import ordered_map
from p2pcast.relay.pieces import PieceSet
from p2pcast.store import disk, journal
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.files import explained
from p2pcast.store.journal import Journal
from p2pcast.store.log import FileLog, Log


@dataclass(frozen=True, slots=True)
class Partial:
    """``held``: its pieces that are in the log, whole."""

    assembly: Assembly
    log: Log
    held: PieceSet


def resume(folder: Path, run_key: bytes, known: Container[bytes], workers: int) -> list[Partial]:
    """All that lie in ``folder``, but those that are ``known`` whole. Raises LocalError."""
    found: list[Partial] = []
    for path in sorted(folder.glob(f"*{journal.SUFFIX}")):
        part = path.with_name(path.name.removesuffix(journal.SUFFIX))
        assembly = journal.recover(path, run_key)
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
        notes = Journal(path, None)
        log: Log
        if anchor:
            log = AnchorLog(part, assembly.layout, create=True, journal=notes, resumed=True)
        else:
            log = FileLog(part, len(HEADER), head=HEADER, journal=notes, resumed=True)
        found.append(Partial(assembly, log, _good_pieces(log, assembly, workers)))
    return found


def _good_pieces(log: Log, assembly: Assembly, workers: int) -> PieceSet:
    """The pieces in the log whose hashes are those that were signed."""
    piece = assembly.open.piece

    def good(index: int) -> bool:
        size = assembly.piece_bytes(index)
        # The last piece of one that isn't sealed yet may be shorter: how long it is nobody has said, so it comes again.
        data = log.read(index * piece, piece if size is None else size, short=True)
        return blake3.blake3(data).digest() == assembly.piece_hash(index)

    held = PieceSet()
    vouched = [index for index in range(assembly.pieces) if assembly.piece_hash(index) is not None]
    for index, fine in zip(vouched, ordered_map(good, vouched, workers=workers, name="resume"), strict=True):
        if fine:
            held.add(index)
    return held
