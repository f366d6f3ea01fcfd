"""``.p2pd``: an artifact in a file (docs/formats/delta-format.md, section 6).

Guarantees: a file appears under its name only once it is complete. A reader checks, in this order: the magic at both
ends, the tail's length and hash, its framing, layout and key, the signatures, the chain of batches, and the totals.
Every piece is verified when it is read. The error says whether a file is not a .p2pd file, was cut short, or was
damaged. ``public`` is the key that must have signed; if it is None, the key in the file is accepted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import blake3

from p2pcast.artifact.assembly import Assembly, Placed
from p2pcast.artifact.canonical import pack, take_bin
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import KEY_BYTES, FileEntry, Manifest, Open
from p2pcast.codec.layout import Layout
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained, fsync_dir, part_path
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError

MAGIC = b"p2pd"
VERSION = 1
HEADER = MAGIC + bytes([VERSION]) + bytes(11)
FOOTER_BYTES = 24
_END_MARK = MAGIC + bytes([VERSION]) + bytes(3)
_TAIL_KEYS = ("batches", "key", "layout", "manifest", "open")
_TAIL_CAPS = {
    "durable": limits.MAX_DURABLE_BYTES,
    "key": KEY_BYTES,
    "layout": limits.MAX_LAYOUT_BYTES,
    "manifest": limits.MAX_MANIFEST_BYTES,
    "open": limits.MAX_SIGNED_BYTES,
}
"""Maximum size in bytes of each field after ``batches``, in order; ``durable`` may be missing."""
_MIN_SIGNED_BYTES = 64
_MAX_READ_BYTES = 1 << 30
"""Most bytes per read; the kernel transfers at most 2 GiB at a time."""


class Tail(NamedTuple):
    """The records after the log. Their encoding is also the content of an anchor's ``p2pcast-anchor``.

    ``durable``: the hub's durable record; empty if the artifact needs none.
    """

    batches: list[bytes]
    key: bytes
    layout: bytes
    manifest: bytes
    open: bytes
    durable: bytes = b""

    @classmethod
    def of(cls, assembly: Assembly, durable: bytes | None = None) -> Tail:
        """Return the tail of a complete artifact. ``durable``: a record that replaces the assembly's durable record."""
        assert assembly.manifest_signed is not None
        signed = durable or assembly.durable_signed or b""
        return cls(
            assembly.signed_batches(),
            assembly.public,
            assembly.layout.document,
            assembly.manifest_signed,
            assembly.open_signed,
            signed,
        )

    def to_bytes(self) -> bytes:
        return pack({name: value for name, value in self._asdict().items() if value or name != "durable"})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str) -> Tail:
        """Parse canonical msgpack without trusting the lengths in it. Raises IntegrityError."""
        if bytes(data[:1]) not in (b"\x85", b"\x86"):
            raise IntegrityError(f"{where}: not a map of {', '.join(_TAIL_KEYS)}")
        caps = _TAIL_CAPS if data[0] == 0x86 else {name: cap for name, cap in _TAIL_CAPS.items() if name != "durable"}
        at = _take_key(data, 1, "batches", where)
        count, at = _take_list(data, at, where)
        batches: list[bytes] = []
        for _ in range(count):
            start, at = take_bin(data, at, limits.MAX_SIGNED_BYTES, f"{where}: batches")
            batches.append(bytes(data[start:at]))
        found: dict[str, bytes] = {}
        for name, cap in caps.items():
            start, at = take_bin(data, _take_key(data, at, name, where), cap, f"{where}: {name}")
            found[name] = bytes(data[start:at])
        if at != len(data):
            raise IntegrityError(f"{where}: {len(data) - at} bytes are left over")
        if found.get("durable") == b"":
            raise IntegrityError(f"{where}: durable: empty")
        if len(found["key"]) != KEY_BYTES:
            raise IntegrityError(f"{where}: key: not {KEY_BYTES} bytes")
        return cls(batches, **found)

    def assembly(self, layout: Layout) -> Assembly:
        """Verify all records and return them as an assembly with a complete directory. Raises IntegrityError."""
        assembly = Assembly(self.open, self.key, layout)
        assembly.add_manifest(self.manifest)
        if self.durable:
            assembly.add_durable(self.durable)
        for signed in self.batches:
            assembly.add_batch(signed)
        if not assembly.complete_directory:
            raise IntegrityError("batches: fewer than the manifest seals")
        if len(assembly.signed_batches()) != len(self.batches):
            raise IntegrityError("batches: a batch appears twice")
        return assembly


def _take_key(data: bytes | memoryview, at: int, name: str, where: str) -> int:
    expected = pack(name)
    if bytes(data[at : at + len(expected)]) != expected:
        raise IntegrityError(f"{where}: field {name!r} expected at offset {at}")
    return at + len(expected)


def _take_list(data: bytes | memoryview, at: int, where: str) -> tuple[int, int]:
    """Return (number of items, offset of the first item)."""
    head = bytes(data[at : at + 5])
    kind = head[0] if head else 0
    if kind & 0xF0 == 0x90:
        count, width = kind & 0x0F, 0
    else:
        width = {0xDC: 2, 0xDD: 4}.get(kind, 0)
        if not width or len(head) < 1 + width:
            raise IntegrityError(f"{where}: a list expected at offset {at}")
        count = int.from_bytes(head[1 : 1 + width], "big")
        if count < (16 if width == 2 else 1 << 16):
            raise IntegrityError(f"{where}: not in canonical form at offset {at}")
    if count * _MIN_SIGNED_BYTES > len(data):
        raise IntegrityError(f"{where}: a list of {count} is longer than the rest of the data")
    return count, at + 1 + width


def footer(tail: bytes) -> bytes:
    """Return the file's last bytes, which follow the tail."""
    return len(tail).to_bytes(8, "little") + blake3.blake3(tail).digest()[:8] + _END_MARK


class P2pdWriter:
    """Writes to a temporary file next to the final one. A context manager: unless sealed, the file is removed."""

    def __init__(self, path: Path | str, key: RunKey, open: Open, layout: Layout) -> None:
        """Create the temporary file. Raises LocalError."""
        self.path = Path(path)
        self.packer = Packer(key, open, layout)
        self._public = key.public
        self._document = layout.document
        self._part = part_path(self.path)
        self._done = False
        with explained("write", self.path):
            self._fd = disk.create(self._part, os.O_WRONLY | os.O_EXCL, disk.USERS.file)
            self._write(HEADER)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_cell(self, cell: int, codec: int, payload: bytes, before: int, after: int) -> None:
        self.packer.add_cell(cell, codec, payload, before, after)
        self._write(payload)

    def add_file(self, path: str, contents: bytes, *, in_base: bool = False) -> None:
        """Add one of the version's small files. ``in_base``: the base has the same bytes; only the hash is stored."""
        self.packer.add_file(path, None if in_base else contents, len(contents), blake3.blake3(contents).digest())
        if not in_base:
            self._write(contents)

    def seal(self, state: int) -> int:
        """Append the tail, sync and rename the file, and return its size in bytes. Raises LocalError."""
        *batches, manifest = self.packer.seal(state)
        tail = Tail(batches, self._public, self._document, manifest, self.packer.open_signed).to_bytes()
        self._write(tail)
        self._write(footer(tail))
        with explained("write", self.path):
            disk.sync(self._fd, self._part)
            disk.rename(self._part, self.path)
            self._done = True
        fsync_dir(self.path.parent)
        return len(HEADER) + self.packer.log_bytes + len(tail) + FOOTER_BYTES

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if not self._done:
            with suppress(OSError):
                disk.unlink(self._part)

    def _write(self, data: bytes) -> None:
        try:
            with explained("write", self.path):
                disk.write(self._fd, self._part, data)
        except BaseException:
            self.close()
            raise


class P2pdFile:
    """A sealed file whose records have been verified. Reads are thread-safe."""

    def __init__(self, path: Path, fd: int, layout: Layout, assembly: Assembly, public: bytes) -> None:
        """Use ``P2pdFile.open``."""
        assert assembly.manifest is not None
        self.path = path
        self.layout = layout
        self.assembly = assembly
        self.public = public
        self.manifest: Manifest = assembly.manifest
        self._fd = fd

    @classmethod
    def open(cls, path: Path | str, public: bytes | None = None) -> P2pdFile:
        """Open a file and check everything except the pieces. ``public``: the only key that may have signed, or None
        for any. Raises LocalError and IntegrityError.
        """
        path = Path(path)
        with explained("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with explained("read", path):
                log_bytes, tail = _read_tail(fd, path)
            where = f"{path}: damaged"
            records = Tail.from_bytes(tail, f"{where}: tail")
            if public is not None and records.key != public:
                raise IntegrityError(f"{path}: signed by another key ({records.key.hex()[:16]}…) than this run's")
            try:
                layout = Layout.from_document(records.layout)
                assembly = records.assembly(layout)
            except IntegrityError as error:
                raise IntegrityError(f"{where}: {error}") from None
            file = cls(path, fd, layout, assembly, records.key)
            if file.manifest.log != log_bytes:
                raise IntegrityError(f"{where}: its log has {log_bytes} bytes, the manifest says {file.manifest.log}")
        except BaseException:
            os.close(fd)
            raise
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the log after verifying every piece that they are part of. Raises IntegrityError."""
        if size == 0:
            return b""
        pieces = self.assembly.pieces_of(offset, size)
        piece_bytes = self.assembly.open.piece
        begin = pieces.start * piece_bytes
        end = min(pieces.stop * piece_bytes, self.manifest.log)
        with explained("read", self.path):
            data = memoryview(_pread(self._fd, end - begin, len(HEADER) + begin))
        for piece in pieces:
            at = (piece - pieces.start) * piece_bytes
            if blake3.blake3(data[at : at + piece_bytes]).digest() != self.assembly.piece_hash(piece):
                raise IntegrityError(
                    f"{self.path}: damaged: piece {piece} (bytes {len(HEADER) + begin + at} and on) "
                    "does not match its hash"
                )
        return bytes(data[offset - begin : offset - begin + size])

    def read_cell(self, placed: Placed) -> bytes:
        """Return a cell's payload, verified. Raises IntegrityError."""
        return self.read(placed.offset, placed.bytes)

    def read_file(self, entry: FileEntry) -> bytes:
        """Return a small file's contents from the log, verified. Raises IntegrityError."""
        assert entry.offset is not None
        contents = self.read(entry.offset, entry.size)
        if blake3.blake3(contents).digest() != entry.hash:
            raise IntegrityError(f"{self.path}: damaged: small file {entry.path!r} does not match its hash")
        return contents

    def verify_pieces(self) -> None:
        """Read and verify the whole log. Raises IntegrityError."""
        step = limits.BATCH_PIECES * self.assembly.open.piece
        for offset in range(0, self.manifest.log, step):
            self.read(offset, min(step, self.manifest.log - offset))


def _pread(fd: int, size: int, offset: int) -> bytes:
    """Read ``size`` bytes, or fewer at the end of the file. Raises OSError."""
    parts: list[bytes] = []
    while size:
        part = os.pread(fd, min(size, _MAX_READ_BYTES), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_tail(fd: int, path: Path) -> tuple[int, bytes]:
    """Return (log size in bytes, tail) after checking both ends, length and hash. Raises IntegrityError, OSError."""
    size = os.fstat(fd).st_size
    head = _pread(fd, len(HEADER), 0)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise IntegrityError(f"{path}: not a .p2pd file")
    if size < len(HEADER) + FOOTER_BYTES:
        raise IntegrityError(f"{path}: cut short: {size} bytes are too few for a .p2pd file; fetch it again")
    if head != HEADER:
        if head[4] != VERSION and head[5:] == HEADER[5:]:
            raise IntegrityError(f"{path}: .p2pd of version {head[4]}; this p2pcast reads version {VERSION}")
        raise IntegrityError(f"{path}: damaged: its first {len(HEADER)} bytes are wrong")
    end = _pread(fd, FOOTER_BYTES, size - FOOTER_BYTES)
    if end[16:] != _END_MARK:
        raise IntegrityError(f"{path}: cut short (or still being written): its end mark is missing; fetch it again")
    tail_bytes = int.from_bytes(end[:8], "little")
    if tail_bytes > limits.MAX_TAIL_BYTES or tail_bytes > size - len(HEADER) - FOOTER_BYTES:
        raise IntegrityError(f"{path}: damaged: a tail of {tail_bytes} bytes does not fit")
    tail = _pread(fd, tail_bytes, size - FOOTER_BYTES - tail_bytes)
    if blake3.blake3(tail).digest()[:8] != end[8:16]:
        raise IntegrityError(f"{path}: damaged: its tail does not match its hash")
    return size - len(HEADER) - FOOTER_BYTES - tail_bytes, tail
