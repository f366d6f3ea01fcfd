"""What a node keeps on disk: sealed deltas (``.p2pd`` files), anchors (Hugging Face folders), and small files by hash.

Promises: an artifact is found under its name only when it is whole and durable, and what takes its place leaves it there until then; what was being received
when a process died is gone on with (``resume``) or swept away at the next start; nothing is opened whose signatures have not matched. Synchronous: daemons
call it from an executor.

    deltas/<branch>.<step>-<artifact, 8 hex digits>.p2pd
    anchors/<branch>.<step>/          files/<BLAKE3, hex>
    partial/<artifact, hex>           partial/<artifact, hex>.records (``store.journal``)          partial/<branch>.<step>.replaced
    partial/<artifact, hex>.excerpt
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy.typing as npt

from p2pcast import limits
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.p2pd import FOOTER_BYTES, HEADER, P2pdFile, Tail, footer
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import ANCHOR, DELTA, RAW, FileEntry, Manifest, Open, RunKey, run_id
from p2pcast.checkpoint.folder import SINGLE, write_folder
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.digest import digest
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, P2PCastError
from p2pcast.parallel import ordered_map
from p2pcast.relay.pieces import PieceSet
from p2pcast.store import disk, journal
from p2pcast.store.anchor_log import FILES_NAME, AnchorLog
from p2pcast.store.files import atomic_write, explained, fsync_dir
from p2pcast.store.journal import Journal
from p2pcast.store.log import FileLog, Log
from p2pcast.store.retention import expendable
from p2pcast.version import Version

ANCHOR_RECORD = "p2pcast-anchor"
SYNC_BYTES = 16 * limits.MIB
"""Of an anchor that is written beside live traffic: a delta that is sealed meanwhile waits for no more to reach the disk."""
REPLACED = ".replaced"
GONE = ".gone"
EXCERPT = ".excerpt"


@dataclass(frozen=True, slots=True)
class Stored:
    """A sealed artifact on disk."""

    assembly: Assembly
    path: Path

    @property
    def id(self) -> bytes:
        return self.assembly.open.artifact

    @property
    def kind(self) -> str:
        return self.assembly.open.kind

    @property
    def base(self) -> Version | None:
        return self.assembly.open.base

    @property
    def version(self) -> Version:
        return self.assembly.open.version

    @property
    def manifest(self) -> Manifest:
        assert self.assembly.manifest is not None
        return self.assembly.manifest


@dataclass(frozen=True, slots=True)
class Partial:
    """What an earlier process received of an artifact. ``held``: its pieces that are in the log, whole."""

    assembly: Assembly
    log: Log
    held: PieceSet


class Store:
    """``run_key``: the run's public key."""

    def __init__(self, root: Path, run_key: bytes, *, keep_partial: bool = False) -> None:
        """Opens the folder and lists what is whole in it. ``keep_partial``: what was half received stays, for ``resume``. Raises LocalError."""
        self.root = root
        self.run_key = run_key
        self.damaged: list[tuple[Path, str]] = []
        """What was found and can't be used, with the reason; it is left where it is."""
        self.artifacts: Mapping[bytes, Stored] = {}
        """Replaced whole at each change: other threads may be looking at it."""
        self._noted: Manifest | None = None
        self._changing = threading.Lock()
        """Several artifacts may be sealed at once, and retention must not take a small file whose version is being sealed for left over."""
        with explained("create", root):
            for name in ("deltas", "anchors", "files", "partial"):
                disk.make_folder(root / name)
        with explained("clean", root / "partial"):
            self._put_back()
            self._sweep(keep_partial)
        for path in sorted((root / "deltas").glob("*.p2pd")):
            self._load(path, self._load_delta)
        for path in sorted((root / "anchors").iterdir()):
            if (path / ANCHOR_RECORD).is_file():
                self._load(path, self._load_anchor)
            else:
                # An anchor has its record before it has its name.
                with explained("clean", path):
                    _remove(path)

    def _put_back(self) -> None:
        """An anchor that was being replaced when the process died."""
        for aside in (self.root / "partial").glob(f"*{REPLACED}"):
            final = self.root / "anchors" / aside.name.removesuffix(REPLACED)
            if not final.exists():
                disk.rename(aside, final)
                disk.sync_folder(final.parent)

    def _sweep(self, keep_partial: bool) -> None:
        names = {path.name for path in (self.root / "partial").iterdir()}
        for name in names:
            stem = name.removesuffix(journal.SUFFIX)
            if not (keep_partial and {stem, f"{stem}{journal.SUFFIX}"} <= names):
                _remove(self.root / "partial" / name)
        for path in (self.root / "files").glob(".*.part-*"):
            disk.unlink(path, missing_ok=True)

    # -- reading

    def open_log(self, stored: Stored) -> Log:
        if stored.kind == DELTA:
            return FileLog(stored.path, len(HEADER))
        log = AnchorLog(stored.path, stored.assembly.layout)
        log.add_files(stored.manifest)
        return log

    def newest(self) -> Version | None:
        return max((s.version for s in self.artifacts.values()), default=None)

    def manifest(self, version: Version) -> Manifest | None:
        """Any manifest of a version: they agree on its state and files."""
        stored = next((s.manifest for s in self.artifacts.values() if s.version == version), None)
        return self._noted if stored is None and self._noted is not None and self._noted.version == version else stored

    def note(self, manifest: Manifest) -> None:
        """Of a version to which no artifact lies here, and that is held all the same: for its small files."""
        self._noted = manifest

    def lacking(self, version: Version, *, deep: bool = False) -> list[FileEntry]:
        """Small files of a version that are not here, by its manifest, which must be known. ``deep``: their contents count, not their sizes alone. Raises LocalError."""
        manifest = self.manifest(version)
        assert manifest is not None
        return [file for file in manifest.files if not self._has(file, deep=deep)]

    def _has(self, file: FileEntry, *, deep: bool) -> bool:
        path = self.root / "files" / file.hash.hex()
        with explained("read", path):
            if not path.is_file() or path.stat().st_size != file.size:
                return False
            return not deep or blake3.blake3(path.read_bytes()).digest() == file.hash

    def small_files(self, version: Version) -> dict[str, bytes]:
        """Path → contents of the small files of a version; those that never came here are left out. Raises IntegrityError on damage."""
        manifest = self.manifest(version)
        out: dict[str, bytes] = {}
        for file in manifest.files if manifest is not None else ():
            path = self.root / "files" / file.hash.hex()
            if path.exists():
                with explained("read", path):
                    contents = path.read_bytes()
                if blake3.blake3(contents).digest() != file.hash:
                    raise IntegrityError(f"small file {file.path!r} of {version} is damaged: remove {path}")
                out[file.path] = contents
        return out

    def keep_files(self, contents: dict[str, bytes]) -> None:
        """Put small files where ``small_files`` finds them by hash."""
        for data in contents.values():
            path = self.root / "files" / blake3.blake3(data).hexdigest()
            if not path.exists() or path.read_bytes() != data:
                atomic_write(path, data)

    # -- receiving

    def begin(self, open_: Open, layout: Layout, *, resumable: bool = False) -> Log:
        """A log for an artifact that comes in; nothing is touched before it is written to. ``resumable``: ``note`` keeps what ``resume`` needs."""
        path = self.root / "partial" / open_.artifact.hex()
        notes = Journal(self._journal(open_.artifact), layout) if resumable else None
        if open_.kind == ANCHOR:
            return AnchorLog(path, layout, create=True, journal=notes)
        return FileLog(path, len(HEADER), head=HEADER, journal=notes)

    def begin_excerpt(self, open_: Open) -> Log:
        """A log for a few pieces of an artifact, wherever in it they lie: its file has holes. Nothing of it outlives the process."""
        return FileLog(self._excerpt(open_.artifact), 0, head=b"")

    def end_excerpt(self, log: Log, artifact: bytes) -> None:
        log.close()
        with explained("remove", self._excerpt(artifact)):
            _remove(self._excerpt(artifact))

    def _excerpt(self, artifact: bytes) -> Path:
        return self.root / "partial" / f"{artifact.hex()}{EXCERPT}"

    def resume(self, workers: int = 1) -> list[Partial]:
        """What an earlier process began to receive: every piece that is there is read and checked. To be asked once. Raises LocalError."""
        found: list[Partial] = []
        for path in sorted((self.root / "partial").glob(f"*{journal.SUFFIX}")):
            part = path.with_name(path.name.removesuffix(journal.SUFFIX))
            assembly = journal.recover(path, self.run_key)
            anchor = assembly is not None and assembly.open.kind == ANCHOR
            known = assembly is not None and assembly.open.artifact in self.artifacts
            if assembly is None or known or assembly.open.artifact.hex() != part.name or part.is_dir() != anchor:
                with explained("clean", path):
                    _remove(part)
                    _remove(path)
                continue
            notes = Journal(path, None)
            log: Log
            if anchor:
                log = AnchorLog(part, assembly.layout, create=True, journal=notes, resumed=True)
            else:
                log = FileLog(part, len(HEADER), head=HEADER, journal=notes, resumed=True)
            found.append(Partial(assembly, log, _good_pieces(log, assembly, workers)))
        return found

    def _journal(self, artifact: bytes) -> Path:
        return self.root / "partial" / f"{artifact.hex()}{journal.SUFFIX}"

    def seal(self, log: Log, assembly: Assembly) -> Stored:
        """Everything is in the log: make it durable under its name. The log stays readable. Raises LocalError, IntegrityError."""
        with self._changing:
            return self._seal(log, assembly)

    def _seal(self, log: Log, assembly: Assembly) -> Stored:
        manifest = assembly.manifest
        assert manifest is not None
        assert assembly.manifest_signed is not None
        for file in manifest.files:
            if file.offset is not None:
                self._keep(log.read(file.offset, file.size), file)
        tail = Tail(
            assembly.signed_batches(), self.run_key, assembly.layout.document, assembly.manifest_signed, assembly.open_signed
        ).to_bytes()
        part = self.root / "partial" / assembly.open.artifact.hex()
        if isinstance(log, AnchorLog):
            final = self.root / "anchors" / str(manifest.version)
            self._seal_anchor(log, manifest, tail, part, final)
        else:
            assert isinstance(log, FileLog)
            final = self.root / "deltas" / f"{manifest.version}-{manifest.artifact.hex()[:8]}.p2pd"
            with log.descriptor() as fd, explained("write", part):
                end = len(HEADER) + manifest.log
                disk.write_at(fd, part, [tail, footer(tail)], end)
                disk.resize(fd, part, end + len(tail) + FOOTER_BYTES)
                disk.sync(fd, part)
                disk.rename(part, final)
                log.moved(final)
        fsync_dir(final.parent)
        if log.journal is not None:
            log.journal.close()
            with explained("clean", log.journal.path):
                disk.unlink(log.journal.path, missing_ok=True)
        return self._add(assembly, final)

    def _seal_anchor(self, log: AnchorLog, manifest: Manifest, tail: bytes, part: Path, final: Path) -> None:
        for file in manifest.files:
            target = part / file.path
            with explained("write", target):
                disk.make_folder(target.parent)
            atomic_write(target, log.read(file.offset or 0, file.size))
        log.sync()
        with explained("write", part):
            disk.unlink(part / FILES_NAME, missing_ok=True)
        atomic_write(part / ANCHOR_RECORD, tail)
        self._take_name(part, final)
        log.moved(final)

    def _take_name(self, part: Path, final: Path) -> None:
        """A whole, synced anchor; one that has its name stays until then, and is put back by the next start if this one dies in between."""
        aside = self.root / "partial" / f"{final.name}{REPLACED}"
        with explained("write", final):
            _remove(aside)
            if final.exists():
                disk.rename(final, aside)
            disk.rename(part, final)
        fsync_dir(final.parent)
        with explained("clean", aside):
            _remove(aside)

    def abandon(self, log: Log, artifact: bytes) -> None:
        log.close()
        part = self.root / "partial" / artifact.hex()
        with explained("remove", part):
            _remove(self._journal(artifact))
            _remove(part)

    # -- making anchors (hub)

    def write_anchor(
        self,
        key: RunKey,
        artifact: bytes,
        version: Version,
        layout: Layout,
        words_of: Callable[[Cell], npt.NDArray[Any]],
        digests: npt.NDArray[Any],
        files: dict[str, bytes],
        *,
        workers: int = 1,
    ) -> Stored:
        """A whole state as an anchor folder, signed. ``digests``: u64 a cell. Raises LocalError, and IntegrityError if ``words_of`` lies."""
        record = Open(artifact, None, ANCHOR, layout.layout_id, limits.ANCHOR_PIECE_BYTES, run_id(key.public), version)
        packer = Packer(key, record, layout)
        final, part = self.root / "anchors" / str(version), self.root / "partial" / artifact.hex()
        batches: list[bytes] = []

        def fed(cell: Cell) -> npt.NDArray[Any]:
            # One thread, cells in order: the packer hashes what is written.
            words = words_of(cell)
            if digest(words, cell) != int(digests[cell.index]):
                raise IntegrityError(f"{part}: cell {cell.index} of version {version} is not what its digest says")
            packer.add_cell(cell.index, RAW, words.data.cast("B"), 0, int(digests[cell.index]))
            while (batch := packer.take_batch()) is not None:
                batches.append(batch)
            return words

        try:
            stored = self._write_anchor(part, final, packer, key, layout, fed, files, digests, batches)
        except BaseException:
            with suppress(OSError):
                _remove(part)
            raise
        return stored

    def _write_anchor(
        self,
        part: Path,
        final: Path,
        packer: Packer,
        key: RunKey,
        layout: Layout,
        fed: Callable[[Cell], npt.NDArray[Any]],
        files: dict[str, bytes],
        digests: npt.NDArray[Any],
        batches: list[bytes],
    ) -> Stored:
        write_folder(part, layout, fed, files, sync_bytes=SYNC_BYTES)
        for path, contents in files.items():
            packer.add_file(path, contents, len(contents), blake3.blake3(contents).digest())
        *rest, manifest = packer.seal(int(digests.sum(dtype="u8")))
        tail = Tail([*batches, *rest], key.public, layout.document, manifest, packer.open_signed)
        self.keep_files(files)
        assembly = tail.assembly(layout)
        atomic_write(part / ANCHOR_RECORD, tail.to_bytes())
        with self._changing:
            self._take_name(part, final)
            return self._add(assembly, final)

    # -- retention

    def retain(self, spare: frozenset[bytes] = frozenset()) -> list[Stored]:
        """Remove what may go, but nothing in ``spare``; what was removed."""
        aside: list[Path] = []
        with self._changing:
            gone = self._retain(spare, aside)
        _remove_all(aside)
        return gone

    def discard(self, artifact: bytes) -> None:
        """Remove one that turned out to be damaged. What it says of its version is signed, and stays known."""
        aside: list[Path] = []
        with self._changing:
            if artifact in self.artifacts:
                manifest = self._remove(artifact, aside).manifest
                if self._noted is None or manifest.version > self._noted.version:
                    self._noted = manifest
        _remove_all(aside)

    def _retain(self, spare: frozenset[bytes], aside: list[Path]) -> list[Stored]:
        gone = [self._remove(artifact, aside) for artifact in expendable(self.artifacts.values()) if artifact not in spare]
        if gone:
            manifests = [s.manifest for s in self.artifacts.values()] + ([] if self._noted is None else [self._noted])
            used = {file.hash.hex() for manifest in manifests for file in manifest.files}
            for path in (self.root / "files").iterdir():
                if path.name not in used:
                    with explained("remove", path):
                        disk.unlink(path, missing_ok=True)
        return gone

    # -- inside

    def _add(self, assembly: Assembly, path: Path) -> Stored:
        stored = Stored(assembly, path)
        self.artifacts = {**self.artifacts, stored.id: stored}
        return stored

    def _remove(self, artifact: bytes, aside: list[Path]) -> Stored:
        """A folder goes ``aside``, where the caller removes it once nobody waits: that takes long where it is large."""
        stored = self.artifacts[artifact]
        self.artifacts = {a: s for a, s in self.artifacts.items() if a != artifact}
        with explained("remove", stored.path):
            if stored.path.is_dir():
                # Out of sight first: nobody finds half of it.
                gone = self.root / "partial" / f"{stored.path.name}-{secrets.token_hex(4)}{GONE}"
                disk.rename(stored.path, gone)
                aside.append(gone)
            else:
                disk.unlink(stored.path, missing_ok=True)
        return stored

    def _keep(self, contents: bytes, file: FileEntry) -> None:
        if blake3.blake3(contents).digest() != file.hash:
            raise IntegrityError(f"small file {file.path!r} does not match its hash")
        path = self.root / "files" / file.hash.hex()
        if not path.exists():
            atomic_write(path, contents)

    def _load(self, path: Path, load: Callable[[Path], None]) -> None:
        try:
            load(path)
        except P2PCastError as error:
            self.damaged.append((path, str(error)))

    def _load_delta(self, path: Path) -> None:
        with P2pdFile.open(path, self.run_key) as file:
            self._add(file.assembly, path)

    def _load_anchor(self, path: Path) -> None:
        where = str(path / ANCHOR_RECORD)
        with explained("read", where):
            tail = Tail.from_bytes((path / ANCHOR_RECORD).read_bytes(), where)
        if tail.key != self.run_key:
            raise IntegrityError(f"{path}: signed by another run's key")
        assembly = tail.assembly(Layout.from_document(tail.layout))
        stored = Stored(assembly, path)
        weights = path / SINGLE
        if not weights.is_file() or weights.stat().st_size != len(header_for(assembly.layout)) + assembly.layout.nbytes:
            raise IntegrityError(
                f"{weights}: missing, or not of the size that was sealed; remove {path} to have it fetched again"
            )
        for file in stored.manifest.files:
            small = path / file.path
            if not small.is_file() or small.stat().st_size != file.size:
                raise IntegrityError(
                    f"{small}: missing, or not of the size that was sealed; remove {path} to have it fetched again"
                )
        self._add(assembly, path)


def _remove(path: Path) -> None:
    """A file or a folder; neither may be there."""
    if path.is_dir() and not path.is_symlink():
        disk.remove_tree(path)
    else:
        disk.unlink(path, missing_ok=True)


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        with explained("remove", path):
            _remove(path)


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
