"""Signed records: what the run's key states about an artifact (docs/formats/delta-format.md, section 5).

A version's content never changes. Its *version hash* is the BLAKE3 hash of the body of the manifest that first sealed
it. Every later artifact of the version (an anchor, a squash) contains that hash, and every delta contains its base's
hash. So versions form a chain, and any two artifacts show whether a version number means the same state in both.

Guarantees: a record returned by ``from_signed`` was signed by the run's key, is canonical, and has every field in
range. The checks run in that order; bytes are unpacked only after their signature has been verified. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from p2pcast.artifact.canonical import U64, Fields, pack, take_bin
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

HASH_BYTES = 32
ID_BYTES = 16
KEY_BYTES = 32
"""Length of the run's secret key, and of its public key."""
SIGNATURE_BYTES = 64
KINDS = ("delta", "anchor")
DELTA, ANCHOR = KINDS
RAW = 1
"""The codec of an anchor's cells; the codec package defines the other codecs."""
MAX_CODEC = 4
STATE = "state"
"""The part that every version has: the weights in the run's layout.

Other parts (an adapter, a quantised copy) are separate artifacts, sealed by the state's manifest.
"""
OWN = b""
"""Value of ``version_hash`` in the manifest that seals a version: the version hash is that manifest's own hash."""


class Signer(Protocol):
    """The part of the run's key (``p2pcast.artifact.run_key``) that records need."""

    public: bytes

    def sign(self, message: bytes) -> bytes: ...


def payload_fits(codec: int, size: int, cell_bytes: int) -> bool:
    """Whether a payload of ``size`` bytes is possible for a cell of ``cell_bytes``. Readers size their buffers by this
    limit.
    """
    return size == cell_bytes if codec == RAW else 1 <= size <= 2 * cell_bytes + limits.CELL_OVERHEAD_BYTES


def run_id(public: bytes) -> bytes:
    """Return the run's 16-byte id, which is derived from its public key."""
    return blake3.blake3(public).digest()[:ID_BYTES]


@lru_cache(maxsize=64)
def _public_key(public: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public)


def _verified(signed: bytes, public: bytes, domain: bytes, cap: int, where: str) -> bytes:
    """Return a signed record's body after checking its size, framing and signature. Raises IntegrityError."""
    if len(signed) > cap:
        raise IntegrityError(f"{where}: {len(signed)} bytes, over the limit of {cap}")
    if signed[:1] != b"\x92":
        raise IntegrityError(f"{where}: not a signed record")
    start, end = take_bin(signed, 1, cap, where)
    sig_start, sig_end = take_bin(signed, end, SIGNATURE_BYTES, f"{where}: signature")
    if sig_end - sig_start != SIGNATURE_BYTES or sig_end != len(signed):
        raise IntegrityError(f"{where}: not a body and a signature of {SIGNATURE_BYTES} bytes")
    body = signed[start:end]
    try:
        _public_key(public).verify(signed[sig_start:sig_end], domain + body)
    except (InvalidSignature, ValueError):
        raise IntegrityError(f"{where}: signature: not made by this run's key") from None
    return body


class _Record(ABC):
    """What all records have in common. Subclasses are frozen dataclasses."""

    domain: ClassVar[bytes]
    where: ClassVar[str]
    cap: ClassVar[int]
    names: ClassVar[Mapping[int, frozenset[str]]]
    """Fields by format number."""

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """Return the body's fields by name; ``v`` is the lowest format that can express the record."""

    @classmethod
    @abstractmethod
    def _from_fields(cls, fields: Fields) -> Self:
        """Build the record. Raises IntegrityError with the name of the first field that is out of range."""

    @cached_property
    def body(self) -> bytes:
        """The record as canonical msgpack, without its signature."""
        return pack(self._values())

    @cached_property
    def body_hash(self) -> bytes:
        """BLAKE3 hash of the body, which the next record in the chain contains."""
        return blake3.blake3(self.body).digest()

    def to_signed(self, key: Signer) -> bytes:
        return pack([self.body, key.sign(self.domain + self.body)])

    @classmethod
    def from_signed(cls, signed: bytes, public: bytes) -> Self:
        """Check size and framing, then the signature, then every field. Raises IntegrityError at the first fault."""
        body = _verified(signed, public, cls.domain, cls.cap, cls.where)
        record = cls._from_fields(Fields(cls.where, body, cls.names))
        record.__dict__["body"] = body
        return record


_OPEN_NAMES = frozenset({"artifact", "base", "branch", "kind", "layout", "piece", "run", "step", "v"})
_OPEN_FORMATS = {1: _OPEN_NAMES, 2: _OPEN_NAMES | {"base_hash", "part"}}


@dataclass(frozen=True)
class Open(_Record):
    """Starts an artifact. ``base``: None for an anchor; ``piece``: in bytes; ``part``: which part of the version it is.

    ``base_hash``: the base's version hash; None if unknown (states from release 0.1, deltas made offline).
    """

    artifact: bytes
    base: Version | None
    kind: str
    layout: bytes
    piece: int
    run: bytes
    version: Version
    base_hash: bytes | None = None
    part: str = STATE

    domain = b"p2pcast open 1\0"
    where = "open record"
    cap = limits.MAX_SIGNED_BYTES
    names = _OPEN_FORMATS

    def _values(self) -> dict[str, Any]:
        more = (
            {}
            if self.base_hash is None and self.part == STATE
            else {"base_hash": self.base_hash, "part": self.part, "v": 2}
        )
        return {
            "v": 1,
            **more,
            "artifact": self.artifact,
            "base": None if self.base is None else list(self.base),
            "branch": self.version.branch,
            "kind": self.kind,
            "layout": self.layout,
            "piece": self.piece,
            "run": self.run,
            "step": self.version.step,
        }

    @classmethod
    def _from_fields(cls, fields: Fields) -> Self:
        artifact, base, kind, layout, run, version = _common(fields)
        piece = fields.integer("piece", limits.MAX_PIECE_BYTES)
        if piece < limits.MIN_PIECE_BYTES or piece & (piece - 1):
            raise fields.invalid(
                "piece", f"not a power of two from {limits.MIN_PIECE_BYTES} to {limits.MAX_PIECE_BYTES}"
            )
        if fields.format == 1:
            return cls(artifact, base, kind, layout, piece, run, version)
        base_hash = fields.binary_or_nil("base_hash", HASH_BYTES)
        if base is None and base_hash is not None:
            raise fields.invalid("base_hash", "an anchor has no base")
        return cls(
            artifact, base, kind, layout, piece, run, version, base_hash, fields.text("part", limits.MAX_PART_NAME)
        )


class CellEntry(NamedTuple):
    """A directory entry: the cell's number, its codec, its payload's size, and its digests before and after."""

    cell: int
    codec: int
    bytes: int
    before: int
    after: int


_BATCH_FORMATS = {1: frozenset({"artifact", "cells", "first", "hashes", "prev", "seq", "v"})}


@dataclass(frozen=True)
class Batch(_Record):
    """Signs the pieces from ``first`` on and continues the directory. ``hashes``: 32 bytes per piece, concatenated."""

    artifact: bytes
    cells: tuple[CellEntry, ...]
    first: int
    hashes: bytes
    prev: bytes
    seq: int

    domain = b"p2pcast batch 1\0"
    where = "batch"
    cap = limits.MAX_SIGNED_BYTES
    names = _BATCH_FORMATS

    @property
    def pieces(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def _values(self) -> dict[str, Any]:
        return {
            "artifact": self.artifact,
            "cells": [list(c) for c in self.cells],
            "first": self.first,
            "hashes": self.hashes,
            "prev": self.prev,
            "seq": self.seq,
            "v": 1,
        }

    @classmethod
    def _from_fields(cls, fields: Fields) -> Self:
        artifact = fields.binary("artifact", ID_BYTES)
        cells: list[CellEntry] = []
        for number, row in enumerate(fields.rows("cells", 5, limits.BATCH_CELLS)):
            for value in row:
                if type(value) is not int or not 0 <= value <= U64:
                    raise fields.invalid(f"cells[{number}]", "not five integers from 0 to 2^64 − 1")
            entry = CellEntry(*row)
            if not RAW <= entry.codec <= MAX_CODEC:
                raise fields.invalid(f"cells[{number}]", f"codec {entry.codec} is unknown to this p2pcast")
            if not 1 <= entry.bytes <= limits.MAX_STATE_BYTES:
                raise fields.invalid(f"cells[{number}]", f"payload of {entry.bytes} bytes is out of range")
            cells.append(entry)
        first = fields.integer("first", limits.MAX_STATE_BYTES)
        hashes = fields.any_binary("hashes")
        if len(hashes) % HASH_BYTES or len(hashes) > limits.BATCH_PIECES * HASH_BYTES:
            raise fields.invalid("hashes", f"not a row of at most {limits.BATCH_PIECES} hashes")
        if not hashes and not cells:
            raise fields.invalid("hashes", "a batch without pieces and without cells")
        return cls(
            artifact,
            tuple(cells),
            first,
            hashes,
            fields.binary("prev", HASH_BYTES),
            fields.integer("seq", limits.MAX_STATE_BYTES),
        )


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One of the version's small files. ``offset``: where it is in the log; None if the base has the same bytes."""

    path: str
    size: int
    hash: bytes
    offset: int | None


class PartEntry(NamedTuple):
    """A further part of the version: its name, its artifact, and the hash of the body of that artifact's manifest."""

    part: str
    artifact: bytes
    manifest: bytes


_MANIFEST_NAMES = frozenset(
    {
        "artifact", "base", "batches", "branch", "cells", "files", "kind", "last", "layout", "log", "pieces", "run",
        "state", "step", "v",
    }
)  # fmt: skip


_MANIFEST_FORMATS = {1: _MANIFEST_NAMES, 2: _MANIFEST_NAMES | {"parts", "version_hash"}}


@dataclass(frozen=True)
class Manifest(_Record):
    """The record that seals an artifact. ``state``: the digest of the whole resulting state; ``log``: the log's size in
    bytes; ``parts``: the version's further parts, by name.

    ``version_hash``: OWN if this manifest seals its version; the version's hash if the version was sealed before
    (anchor, squash); None if there is no such hash (release 0.1, deltas made offline).
    """

    artifact: bytes
    base: Version | None
    batches: int
    cells: int
    files: tuple[FileEntry, ...]
    kind: str
    last: bytes
    layout: bytes
    log: int
    pieces: int
    run: bytes
    state: int
    version: Version
    version_hash: bytes | None = None
    parts: tuple[PartEntry, ...] = ()

    domain = b"p2pcast manifest 1\0"
    where = "manifest"
    cap = limits.MAX_MANIFEST_BYTES
    names = _MANIFEST_FORMATS

    @property
    def identity(self) -> bytes | None:
        """The version's hash; None if unknown."""
        return self.body_hash if self.version_hash == OWN else self.version_hash

    def file_hash(self, path: str) -> bytes | None:
        """Return the BLAKE3 hash of the version's small file at ``path``; None if there is none."""
        return next((file.hash for file in self.files if file.path == path), None)

    def _values(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.version_hash is not None or self.parts:
            more = {"version_hash": self.version_hash, "parts": [list(p) for p in self.parts], "v": 2}
        return {
            "v": 1,
            **more,
            "artifact": self.artifact,
            "base": None if self.base is None else list(self.base),
            "batches": self.batches,
            "branch": self.version.branch,
            "cells": self.cells,
            "files": [[f.path, f.size, f.hash, f.offset] for f in self.files],
            "kind": self.kind,
            "last": self.last,
            "layout": self.layout,
            "log": self.log,
            "pieces": self.pieces,
            "run": self.run,
            "state": self.state,
            "step": self.version.step,
        }

    @classmethod
    def _from_fields(cls, fields: Fields) -> Self:
        artifact, base, kind, layout, run, version = _common(fields)
        return cls(
            artifact,
            base,
            fields.integer("batches", limits.MAX_STATE_BYTES),
            fields.integer("cells", limits.MAX_STATE_BYTES),
            _files(fields),
            kind,
            fields.binary("last", HASH_BYTES),
            layout,
            fields.integer("log", 2 * limits.MAX_STATE_BYTES),
            fields.integer("pieces", limits.MAX_STATE_BYTES),
            run,
            fields.integer("state"),
            version,
            *(() if fields.format == 1 else (_version_hash(fields), _parts(fields))),
        )


_DURABLE_FORMATS = {2: frozenset({"artifact", "branch", "manifest", "run", "step", "v"})}


@dataclass(frozen=True)
class Durable(_Record):
    """States that the hub has this version on its disk and has verified that it decodes, so that engines may serve it.

    ``manifest``: the version's hash. A version without this record may be lost if the hub fails before storing it; its
    number is then never used again.
    """

    artifact: bytes
    manifest: bytes
    run: bytes
    version: Version

    domain = b"p2pcast durable 1\0"
    where = "durable record"
    cap = limits.MAX_DURABLE_BYTES
    names = _DURABLE_FORMATS

    def _values(self) -> dict[str, Any]:
        return {
            "artifact": self.artifact,
            "branch": self.version.branch,
            "manifest": self.manifest,
            "run": self.run,
            "step": self.version.step,
            "v": 2,
        }

    @classmethod
    def _from_fields(cls, fields: Fields) -> Self:
        return cls(
            fields.binary("artifact", ID_BYTES),
            fields.binary("manifest", HASH_BYTES),
            fields.binary("run", ID_BYTES),
            Version(fields.integer("branch", limits.MAX_BRANCH), fields.integer("step", limits.MAX_STEP)),
        )


def _version_hash(fields: Fields) -> bytes | None:
    value = fields.binary_up_to("version_hash", HASH_BYTES)
    if value is not None and len(value) not in (0, HASH_BYTES):
        raise fields.invalid("version_hash", f"neither nil, nor empty, nor {HASH_BYTES} bytes")
    return value


def _parts(fields: Fields) -> tuple[PartEntry, ...]:
    parts: list[PartEntry] = []
    for number, (part, artifact, manifest) in enumerate(fields.rows("parts", 3, limits.MAX_PARTS)):
        name = f"parts[{number}]"
        fields.checked_text(f"{name} name", part, limits.MAX_PART_NAME)
        fields.checked_binary(f"{name} artifact", artifact, ID_BYTES)
        fields.checked_binary(f"{name} manifest", manifest, HASH_BYTES)
        parts.append(PartEntry(part, artifact, manifest))
    names = [p.part for p in parts]
    if STATE in names or names != sorted(set(names)):
        raise fields.invalid("parts", f"not sorted by name, or a name appears twice, or is {STATE!r}")
    return tuple(parts)


def _common(fields: Fields) -> tuple[bytes, Version | None, str, bytes, bytes, Version]:
    artifact = fields.binary("artifact", ID_BYTES)
    base = fields.version_or_nil("base")
    kind = fields.choice("kind", KINDS)
    layout = fields.binary("layout", HASH_BYTES)
    run = fields.binary("run", ID_BYTES)
    version = Version(fields.integer("branch", limits.MAX_BRANCH), fields.integer("step", limits.MAX_STEP))
    if (base is None) != (kind == ANCHOR):
        raise fields.invalid("base", "a delta has one, an anchor has none")
    if base is not None and base >= version:
        raise fields.invalid("base", f"{base} is not before {version}")
    return artifact, base, kind, layout, run, version


def _files(fields: Fields) -> tuple[FileEntry, ...]:
    files: list[FileEntry] = []
    for number, (path, size, digest, offset) in enumerate(fields.rows("files", 4, limits.MAX_FILES)):
        name = f"files[{number}]"
        fault = path_fault(path)
        if fault:
            raise fields.invalid(name, f"path {fault}")
        fields.checked_integer(f"{name} bytes", size, limits.MAX_SMALL_FILE_BYTES)
        fields.checked_binary(f"{name} hash", digest, HASH_BYTES)
        if offset is not None:
            fields.checked_integer(f"{name} offset", offset, 2 * limits.MAX_STATE_BYTES)
        files.append(FileEntry(path, size, digest, offset))
    paths = [f.path for f in files]
    if paths != sorted(set(paths)):
        raise fields.invalid("files", "not sorted by path, or a path appears twice")
    known = set(paths)
    for path in paths:
        parts = path.split("/")
        if any("/".join(parts[:n]) in known for n in range(1, len(parts))):
            raise fields.invalid("files", f"{path!r} is below another file")
    if sum(f.size for f in files) > limits.MAX_FILES_BYTES:
        raise fields.invalid("files", f"more than {limits.MAX_FILES_BYTES} bytes together")
    return tuple(files)


RESERVED_NAMES = frozenset({"STABLE", "latest", "p2pcast-anchor"})
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


def path_fault(path: Any) -> str | None:
    """Return why ``path`` is not allowed as a small file's path; None if it is allowed.

    The file is created in a folder that other programs read. It must stay inside that folder, must not be hidden, and
    must not replace the weights.
    """
    if type(path) is not str or not path:
        return "is not text"
    if len(path) > limits.MAX_PATH_BYTES or len(path.encode("utf-8", "replace")) > limits.MAX_PATH_BYTES:
        return f"is longer than {limits.MAX_PATH_BYTES} bytes"
    if any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in path) or "\\" in path:
        return f"{path!r} has a backslash or a control character"
    parts = path.split("/")
    if any(p == "" or p.startswith(".") for p in parts):
        return f"{path!r} has an empty or hidden part"
    if any(len(p.encode()) > limits.MAX_PATH_PART_BYTES for p in parts):
        return f"{path!r} has a part longer than {limits.MAX_PATH_PART_BYTES} bytes"
    if parts[0] in RESERVED_NAMES or path.lower().endswith(WEIGHT_SUFFIXES):
        return f"{path!r} is a name that p2pcast writes itself"
    return None
