"""The receiver's view of one artifact: its batches (received in any order), its directory in log order, its manifest.

Guarantees: every value that an assembly returns was signed by the run's key, fits the layout, and does not contradict
earlier values. The layout bounds memory: no more pieces than its cells can fill, and no cell twice. If the key signs
two contradictory records, the artifact is broken permanently. Looking up a piece's hash takes O(1). Pure: no files,
sockets or clock.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pcast.artifact.signed_records import (
    ANCHOR,
    HASH_BYTES,
    OWN,
    RAW,
    Batch,
    CellEntry,
    Durable,
    Manifest,
    Open,
    payload_fits,
    run_id,
)
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError


class Placed(NamedTuple):
    """A directory entry and its payload's offset in the log (bytes)."""

    cell: int
    codec: int
    bytes: int
    before: int
    after: int
    offset: int


class _Known(NamedTuple):
    batch: Batch
    signed: bytes


class Assembly:
    """One artifact. A forged record raises IntegrityError and changes nothing; contradictory records also break the
    artifact permanently.
    """

    def __init__(self, open_signed: bytes, public: bytes, layout: Layout) -> None:
        """Start from the signed open record. Raises IntegrityError if it belongs to a different run or layout."""
        self.open = Open.from_signed(open_signed, public)
        if self.open.run != run_id(public):
            raise IntegrityError("open record: run: does not match this run's key")
        if self.open.layout != layout.layout_id:
            raise IntegrityError(
                f"open record: layout: {self.open.layout.hex()[:16]} is not this layout, {layout.layout_id.hex()[:16]}"
            )
        self.open_signed = open_signed
        self.manifest: Manifest | None = None
        self.manifest_signed: bytes | None = None
        self.durable_signed: bytes | None = None
        """The hub's signed durable record; required only for a version's first delta (see ``confirmed``)."""
        self.layout = layout
        self.directory: list[Placed] = []
        """Entries so far, in log order."""
        self._public = public
        self._cells = layout.cells
        most = 2 * layout.nbytes + len(self._cells) * limits.CELL_OVERHEAD_BYTES + limits.MAX_FILES_BYTES
        self._max_pieces = -(-most // self.open.piece)
        self._max_batches = self._max_pieces + len(self._cells)
        self._by_seq: dict[int, _Known] = {}
        self._of_piece: list[_Known | None] = []
        self._raw: set[bytes] = set()
        self._seen = bytearray(len(self._cells))
        self._linked = 0
        self._linked_pieces = 0
        self._linked_bytes = 0
        self._last = self.open.body_hash
        self._complete = False
        self._fault: str | None = None

    # -- state

    @property
    def sealed(self) -> bool:
        """Whether the manifest has been received, so that the number of pieces is final."""
        return self.manifest is not None

    @property
    def complete_directory(self) -> bool:
        """Whether the artifact is sealed, every batch has been received, and all totals and the hash chain match."""
        return self._complete

    @property
    def confirmed(self) -> bool:
        """Whether the artifact is sealed and known to be on the hub's disk, so that engines may serve it.

        Anchors and squashes are signed only after their version is on disk. Artifacts that release 0.1 sealed in a
        store were on disk too.
        """
        manifest = self.manifest
        if manifest is None:
            return False
        return self.open.kind == ANCHOR or manifest.version_hash != OWN or self.durable_signed is not None

    @property
    def public(self) -> bytes:
        """The key that signed the records."""
        return self._public

    @property
    def batches(self) -> int:
        """Number of batches received."""
        return len(self._by_seq)

    @property
    def broken(self) -> bool:
        """Whether the run's key has signed contradicting records of this artifact."""
        return self._fault is not None

    @property
    def pieces(self) -> int:
        """Number of pieces once the artifact is sealed; before that, one more than the highest signed piece."""
        return len(self._of_piece) if self.manifest is None else self.manifest.pieces

    @property
    def linked_pieces(self) -> int:
        """Number of signed pieces before the first gap."""
        return self._linked_pieces

    def piece_hash(self, piece: int) -> bytes | None:
        """Return the BLAKE3 hash of a piece, or None if its batch has not been received."""
        known = self._of_piece[piece] if 0 <= piece < len(self._of_piece) else None
        if known is None:
            return None
        at = (piece - known.batch.first) * HASH_BYTES
        return known.batch.hashes[at : at + HASH_BYTES]

    def piece_bytes(self, piece: int) -> int | None:
        """Return a piece's size in bytes; None if the piece does not exist or may be the last.

        The last piece may be shorter; before the seal its size is at most ``open.piece``.
        """
        if self.manifest is not None:
            if not 0 <= piece < self.manifest.pieces:
                return None
            return min(self.open.piece, self.manifest.log - piece * self.open.piece)
        return self.open.piece if 0 <= piece < len(self._of_piece) - 1 else None

    def pieces_of(self, offset: int, size: int) -> range:
        """Return the pieces that contain ``size`` bytes of the log from ``offset`` on."""
        return range(offset // self.open.piece, -(-(offset + size) // self.open.piece))

    def batch_for_piece(self, piece: int) -> bytes | None:
        """Return the signed batch that contains a piece's hash. It must be forwarded before the piece."""
        known = self._of_piece[piece] if 0 <= piece < len(self._of_piece) else None
        return None if known is None else known.signed

    def batch(self, seq: int) -> bytes | None:
        """Return the signed batch with this number, or None."""
        known = self._by_seq.get(seq)
        return None if known is None else known.signed

    def signed_batches(self) -> list[bytes]:
        """Return all received batches in order of their numbers."""
        return [self._by_seq[seq].signed for seq in sorted(self._by_seq)]

    # -- records

    def add_batch(self, signed: bytes) -> list[Placed]:
        """Add a batch, in any order, and return the directory entries that it made known, in log order. Raises
        IntegrityError.
        """
        self._check_fault()
        if signed in self._raw:
            return []
        batch = Batch.from_signed(signed, self._public)
        self._check_batch(batch)
        known = _Known(batch, bytes(signed))
        self._by_seq[batch.seq] = known
        self._raw.add(known.signed)
        end = batch.first + batch.pieces
        self._of_piece.extend([None] * (end - len(self._of_piece)))
        self._of_piece[batch.first : end] = [known] * batch.pieces
        for entry in batch.cells:
            self._seen[entry.cell] = 1
        return self._link()

    def add_manifest(self, signed: bytes) -> None:
        """Add the manifest. Totals and chain are checked now, or when the last batch arrives. Raises IntegrityError."""
        self._check_fault()
        if self.manifest is not None:
            if signed != self.manifest_signed:
                Manifest.from_signed(signed, self._public)
                raise self._broken("manifest: another manifest of this artifact was received before")
            return
        manifest = Manifest.from_signed(signed, self._public)
        self._check_manifest(manifest)
        self.manifest, self.manifest_signed = manifest, bytes(signed)
        self._finish()

    def add_durable(self, signed: bytes) -> None:
        """Add the hub's durable record, after the manifest. Raises IntegrityError."""
        self._check_fault()
        if signed == self.durable_signed:
            return
        record = Durable.from_signed(signed, self._public)
        manifest = self.manifest
        if manifest is None:
            raise IntegrityError("durable record: received before the manifest")
        for name, ours in (("artifact", self.open.artifact), ("run", self.open.run), ("version", self.open.version)):
            if getattr(record, name) != ours:
                raise IntegrityError(f"durable record: {name}: differs from the open record")
        if record.manifest != manifest.body_hash:
            raise self._broken("durable record: manifest: the record confirms another manifest of this artifact")
        self.durable_signed = bytes(signed)

    # -- checks

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise IntegrityError(self._fault)

    def _broken(self, message: str) -> IntegrityError:
        """Mark the artifact as broken and return the error: its records are contradictory, so none can be trusted."""
        self._fault = f"{message} (artifact {self.open.artifact.hex()} of {self.open.version})"
        return IntegrityError(self._fault)

    def _check_batch(self, batch: Batch) -> None:
        """Check a batch on its own. Changes nothing, except that a contradiction breaks the artifact."""
        if batch.artifact != self.open.artifact:
            raise IntegrityError(f"batch: artifact: not {self.open.artifact.hex()}")
        if batch.seq >= self._max_batches or batch.first + batch.pieces > self._max_pieces:
            raise self._broken(f"batch {batch.seq}: seq or first: more than the layout can fill")
        if batch.seq in self._by_seq:
            raise self._broken(f"batch {batch.seq}: seq: another batch has this number")
        if self.manifest is not None and (
            batch.seq >= self.manifest.batches or batch.first + batch.pieces > self.manifest.pieces
        ):
            raise self._broken(f"batch {batch.seq}: seq or first: beyond what the manifest sealed")
        if any(self._of_piece[batch.first : batch.first + batch.pieces]):
            raise self._broken(f"batch {batch.seq}: first: another batch vouches for these pieces")
        fresh: set[int] = set()
        for entry in batch.cells:
            if entry.cell >= len(self._cells):
                raise self._broken(f"batch {batch.seq}: cell {entry.cell} is not in the layout")
            if self._seen[entry.cell] or entry.cell in fresh:
                raise self._broken(f"batch {batch.seq}: cell {entry.cell} appears twice")
            fresh.add(entry.cell)
            nbytes = self._cells[entry.cell].nbytes
            if not payload_fits(entry.codec, entry.bytes, nbytes):
                raise self._broken(
                    f"batch {batch.seq}: cell {entry.cell} of {nbytes} bytes has a payload of {entry.bytes}"
                )
            if self.open.kind == ANCHOR and (entry.codec != RAW or entry.before != 0):
                raise self._broken(f"batch {batch.seq}: cell {entry.cell}: an anchor's cells are raw, with before = 0")

    def _link(self) -> list[Placed]:
        """Link every batch whose predecessors are linked, and return the directory entries that this places."""
        placed: list[Placed] = []
        while (known := self._by_seq.get(self._linked)) is not None:
            batch = known.batch
            if batch.prev != self._last:
                raise self._broken(f"batch {batch.seq}: prev: not the hash of the record before it")
            if batch.first != self._linked_pieces:
                raise self._broken(
                    f"batch {batch.seq}: first: pieces {self._linked_pieces} to {batch.first} are skipped"
                )
            vouched = (batch.first + batch.pieces) * self.open.piece
            for entry in batch.cells:
                placed.append(self._place(entry, len(self.directory) + len(placed)))
            if self._linked_bytes > vouched:
                raise self._broken(f"batch {batch.seq}: cells: the payloads end after the batch's pieces")
            self._linked += 1
            self._linked_pieces += batch.pieces
            self._last = batch.body_hash
        self.directory.extend(placed)
        self._finish()
        return placed

    def _place(self, entry: CellEntry, number: int) -> Placed:
        if self.open.kind == ANCHOR and entry.cell != number:
            raise self._broken(f"cell {entry.cell}: an anchor's cells must be in order; expected {number}")
        offset = self._linked_bytes
        self._linked_bytes += entry.bytes
        return Placed(*entry, offset)

    def _check_manifest(self, manifest: Manifest) -> None:
        open_ = self.open
        for name in ("artifact", "base", "kind", "layout", "run", "version"):
            if getattr(manifest, name) != getattr(open_, name):
                raise IntegrityError(f"manifest: {name}: differs from the open record")
        if manifest.pieces != -(-manifest.log // open_.piece):
            raise self._broken(f"manifest: pieces: {manifest.pieces} do not make a log of {manifest.log} bytes")
        if manifest.pieces > self._max_pieces or manifest.batches > self._max_batches:
            raise self._broken("manifest: pieces or batches: more than the layout can fill")
        if manifest.cells > len(self._cells) or (open_.kind == ANCHOR and manifest.cells != len(self._cells)):
            raise self._broken(f"manifest: cells: {manifest.cells} do not fit a layout of {len(self._cells)}")
        if open_.kind == ANCHOR and any(f.offset is None for f in manifest.files):
            raise self._broken("manifest: files: an anchor holds the contents of all its files")
        if len(self._of_piece) > manifest.pieces or any(seq >= manifest.batches for seq in self._by_seq):
            raise self._broken("manifest: pieces or batches: fewer than were received")

    def _finish(self) -> None:
        """Check the totals once the manifest and all batches have been received."""
        manifest = self.manifest
        if manifest is None or self._linked < manifest.batches or self._complete:
            return
        if self._last != manifest.last:
            raise self._broken("manifest: last: not the hash of the last batch")
        if self._linked_pieces != manifest.pieces:
            raise self._broken(f"manifest: pieces: {manifest.pieces}, but the batches hold {self._linked_pieces}")
        if len(self.directory) != manifest.cells:
            raise self._broken(f"manifest: cells: {manifest.cells}, but the batches hold {len(self.directory)}")
        end = self._linked_bytes
        for file in sorted((f for f in manifest.files if f.offset is not None), key=lambda f: (f.offset, f.size)):
            if file.offset != end:
                raise self._broken(f"manifest: files: {file.path!r} does not begin where the previous file ends")
            end += file.size
        if end != manifest.log:
            raise self._broken(f"manifest: log: {manifest.log} bytes, but cells and files make {end}")
        if self.open.kind == ANCHOR and sum(p.after for p in self.directory) & ((1 << 64) - 1) != manifest.state:
            raise self._broken("manifest: state: not the sum of the cells' digests")
        self._complete = True
