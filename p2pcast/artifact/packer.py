"""The sender's side of an artifact: turns coded cells into signed batches and a manifest while later cells are coded.

A packer keeps no payloads; the caller must append the same bytes to its log in the same order. Pure: no files, no
clock.
"""

from __future__ import annotations

from collections import deque

import blake3

from p2pcast.artifact.canonical import U64
from p2pcast.artifact.signed_records import (
    ANCHOR,
    HASH_BYTES,
    MAX_CODEC,
    RAW,
    Batch,
    CellEntry,
    Durable,
    FileEntry,
    Manifest,
    Open,
    Signer,
    path_fault,
    payload_fits,
    run_id,
)
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError


class Packer:
    """Add cells, then files, then seal; take batches at any time. Not thread-safe, since the log has one order."""

    def __init__(self, key: Signer, open: Open, layout: Layout) -> None:
        """Start an artifact. Raises UsageError if the open record belongs to a different run or layout."""
        if open.layout != layout.layout_id or open.run != run_id(key.public):
            raise UsageError("the open record is of another layout or run than this packer")
        self.open = open
        self.open_signed: bytes = open.to_signed(key)
        self.manifest: Manifest | None = None
        self._key = key
        self._layout = layout
        self._log = 0
        self._hasher = blake3.blake3()
        self._in_piece = 0
        self._hashes: deque[bytes] = deque()
        self._due: deque[tuple[int, CellEntry]] = deque()
        self._seen = bytearray(len(layout.cells))
        self._cells = 0
        self._files: list[FileEntry] = []
        self._first = 0
        self._seq = 0
        self._last = open.body_hash

    @property
    def log_bytes(self) -> int:
        """Bytes added so far, which is the next payload's offset in the log."""
        return self._log

    def add_cell(self, cell: int, codec: int, payload: bytes | memoryview, before: int, after: int) -> None:
        """Add the log's next payload. Raises UsageError if the cell is invalid or not allowed at this point."""
        size = memoryview(payload).nbytes
        if self.manifest is not None or self._files:
            raise UsageError("cells come before files and before seal()")
        if not 0 <= cell < len(self._seen) or self._seen[cell]:
            raise UsageError(f"cell {cell} is not in the layout, or was added twice")
        if not RAW <= codec <= MAX_CODEC or not 0 <= before <= U64 or not 0 <= after <= U64:
            raise UsageError(f"cell {cell}: codec or digest is out of range")
        nbytes = self._layout.cells[cell].nbytes
        if not payload_fits(codec, size, nbytes):
            raise UsageError(f"cell {cell}: payload of {size} bytes does not fit a cell of {nbytes}")
        if self.open.kind == ANCHOR and (cell != self._cells or codec != RAW or before != 0):
            raise UsageError("an anchor holds every cell raw, in order, with before = 0")
        self._seen[cell] = 1
        self._cells += 1
        self._feed(payload)
        self._due.append((self._log, CellEntry(cell, codec, size, before, after)))

    def add_file(self, path: str, contents: bytes | None, size: int, hash: bytes) -> None:
        """Add one of the version's small files. ``hash``: BLAKE3 of its contents; ``contents``: None if the base has
        the same bytes. Raises UsageError.
        """
        fault = path_fault(path)
        if fault:
            raise UsageError(f"small file {fault}")
        if self.manifest is not None or any(f.path == path for f in self._files):
            raise UsageError(f"small file {path!r}: added twice, or after seal()")
        for other in (f.path for f in self._files):
            if other.startswith(f"{path}/") or path.startswith(f"{other}/"):
                raise UsageError(f"small files {path!r} and {other!r}: one of them would be a folder")
        total = size + sum(f.size for f in self._files)
        if size > limits.MAX_SMALL_FILE_BYTES or total > limits.MAX_FILES_BYTES or len(self._files) >= limits.MAX_FILES:
            raise UsageError(f"small file {path!r}: too large, or over the limit of files")
        if contents is None:
            if self.open.kind == ANCHOR:
                raise UsageError(f"small file {path!r}: an anchor has no base to take it from")
            self._files.append(FileEntry(path, size, hash, None))
            return
        if len(contents) != size or blake3.blake3(contents).digest() != hash:
            raise UsageError(f"small file {path!r}: size or hash does not match its contents")
        self._files.append(FileEntry(path, size, hash, self._log))
        self._feed(contents)

    def take_batch(self, final: bool = False) -> bytes | None:
        """Return the next signed batch, or None if there is nothing to sign yet.

        ``final``: include the last, shorter piece; nothing may be added afterwards.
        """
        if final and self._in_piece:
            self._end_piece()
        hashes = [self._hashes.popleft() for _ in range(min(len(self._hashes), limits.BATCH_PIECES))]
        vouched = min((self._first + len(hashes)) * self.open.piece, self._log)
        cells: list[CellEntry] = []
        while self._due and self._due[0][0] <= vouched and len(cells) < limits.BATCH_CELLS:
            cells.append(self._due.popleft()[1])
        if not hashes and not cells:
            return None
        batch = Batch(self.open.artifact, tuple(cells), self._first, b"".join(hashes), self._last, self._seq)
        self._first += len(hashes)
        self._seq += 1
        self._last = batch.body_hash
        return batch.to_signed(self._key)

    def seal(self, state: int, *, version_hash: bytes | None = None) -> list[bytes]:
        """Seal the artifact and return the remaining signed batches, then the signed manifest.

        ``state``: the digest of the whole state at this version. ``version_hash``: as in ``Manifest``.
        """
        if self.manifest is not None:
            raise UsageError("sealed already")
        if self.open.kind == ANCHOR and self._cells != len(self._seen):
            raise UsageError(f"an anchor holds every cell; {len(self._seen) - self._cells} are missing")
        out: list[bytes] = []
        while (batch := self.take_batch(final=True)) is not None:
            out.append(batch)
        self.manifest = Manifest(
            artifact=self.open.artifact,
            base=self.open.base,
            batches=self._seq,
            cells=self._cells,
            files=tuple(sorted(self._files, key=lambda f: f.path)),
            kind=self.open.kind,
            last=self._last,
            layout=self.open.layout,
            log=self._log,
            pieces=self._first,
            run=self.open.run,
            state=state,
            version=self.open.version,
            version_hash=version_hash,
        )
        out.append(self.manifest.to_signed(self._key))
        return out

    def durable(self) -> bytes:
        """Return the signed durable record. It must not leave this process before the sealed artifact is on disk."""
        assert self.manifest is not None, "sealed first"
        return Durable(self.open.artifact, self.manifest.body_hash, self.open.run, self.open.version).to_signed(
            self._key
        )

    def _feed(self, payload: bytes | memoryview) -> None:
        view = memoryview(payload).cast("B")
        self._log += len(view)
        while view:
            take = view[: self.open.piece - self._in_piece]
            self._hasher.update(take)
            self._in_piece += len(take)
            view = view[len(take) :]
            if self._in_piece == self.open.piece:
                self._end_piece()

    def _end_piece(self) -> None:
        digest = self._hasher.digest()
        assert len(digest) == HASH_BYTES
        self._hashes.append(digest)
        self._hasher = blake3.blake3()
        self._in_piece = 0
