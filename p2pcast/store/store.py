"""What a node keeps on disk: sealed deltas (``.p2pd`` files), anchors (Hugging Face folders), and small files by hash.

Promises: an artifact is found under its name only when it is whole and durable; what was being received when a process died is swept away at the next start;
nothing is opened whose signatures have not matched. Synchronous: daemons call it from an executor.

    deltas/<branch>.<step>-<artifact, 8 hex digits>.p2pd
    anchors/<branch>.<step>/          files/<BLAKE3, hex>          partial/
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy.typing as npt

from p2pcast import limits
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.p2pd import HEADER, P2pdFile, Tail, footer
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import ANCHOR, DELTA, RAW, FileEntry, Manifest, Open, RunKey, run_id
from p2pcast.checkpoint.folder import SINGLE, write_folder
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, P2PCastError
from p2pcast.store.anchor_log import FILES_NAME, AnchorLog
from p2pcast.store.files import atomic_write, explained, fsync_dir, write_all
from p2pcast.store.log import FileLog, Log
from p2pcast.store.retention import expendable
from p2pcast.version import Version

ANCHOR_RECORD = "p2pcast-anchor"


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


class Store:
    """``run_key``: the run's public key."""

    def __init__(self, root: Path, run_key: bytes) -> None:
        """Opens the folder and lists what is whole in it. Raises LocalError."""
        self.root = root
        self.run_key = run_key
        self.damaged: list[tuple[Path, str]] = []
        """What was found and can't be used, with the reason; it is left where it is."""
        self.artifacts: Mapping[bytes, Stored] = {}
        """Replaced whole at each change: other threads may be looking at it."""
        self._changing = threading.Lock()
        """Several artifacts may be sealed at once, and retention must not take a small file whose version is being sealed for left over."""
        with explained("create", root):
            for name in ("deltas", "anchors", "files"):
                (root / name).mkdir(parents=True, exist_ok=True)
            shutil.rmtree(root / "partial", ignore_errors=True)
            (root / "partial").mkdir()
        for path in sorted((root / "deltas").glob("*.p2pd")):
            self._load(path, self._load_delta)
        for path in sorted((root / "anchors").iterdir()):
            if (path / ANCHOR_RECORD).is_file():
                self._load(path, self._load_anchor)
            else:
                # The record is written last: without it the process died in between.
                shutil.rmtree(path, ignore_errors=True)

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
        return next((s.manifest for s in self.artifacts.values() if s.version == version), None)

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
            if not path.exists():
                atomic_write(path, data)

    # -- receiving

    def begin(self, open_: Open, layout: Layout) -> Log:
        """A log for an artifact that comes in; nothing is touched before it is written to."""
        path = self.root / "partial" / open_.artifact.hex()
        if open_.kind == ANCHOR:
            return AnchorLog(path, layout, create=True)
        return FileLog(path, len(HEADER), head=HEADER)

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
                os.lseek(fd, len(HEADER) + manifest.log, os.SEEK_SET)
                write_all(fd, tail + footer(tail))
                os.fsync(fd)
                part.replace(final)
                log.moved(final)
        fsync_dir(final.parent)
        return self._add(assembly, final)

    def _seal_anchor(self, log: AnchorLog, manifest: Manifest, tail: bytes, part: Path, final: Path) -> None:
        for file in manifest.files:
            target = part / file.path
            with explained("write", target):
                target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, log.read(file.offset or 0, file.size))
        log.sync()
        with explained("write", part):
            (part / FILES_NAME).unlink(missing_ok=True)
        atomic_write(part / ANCHOR_RECORD, tail)
        with explained("write", final):
            shutil.rmtree(final, ignore_errors=True)
            part.replace(final)
        log.moved(final)

    def abandon(self, log: Log, artifact: bytes) -> None:
        log.close()
        part = self.root / "partial" / artifact.hex()
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)

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
        final = self.root / "anchors" / str(version)
        with explained("replace", final):
            shutil.rmtree(final, ignore_errors=True)
        batches: list[bytes] = []

        def fed(cell: Cell) -> npt.NDArray[Any]:
            # One thread, cells in order: the packer hashes what is written.
            words = words_of(cell)
            packer.add_cell(cell.index, RAW, words.data.cast("B"), 0, int(digests[cell.index]))
            while (batch := packer.take_batch()) is not None:
                batches.append(batch)
            return words

        write_folder(final, layout, fed, files)
        for path, contents in files.items():
            packer.add_file(path, contents, len(contents), blake3.blake3(contents).digest())
        *rest, manifest = packer.seal(int(digests.sum(dtype="u8")))
        tail = Tail([*batches, *rest], key.public, layout.document, manifest, packer.open_signed)
        self.keep_files(files)
        assembly = tail.assembly(layout)
        atomic_write(final / ANCHOR_RECORD, tail.to_bytes())
        return self._add(assembly, final)

    # -- retention

    def retain(self, spare: frozenset[bytes] = frozenset()) -> list[Stored]:
        """Remove what may go, but nothing in ``spare``; what was removed."""
        with self._changing:
            return self._retain(spare)

    def discard(self, artifact: bytes) -> None:
        """Remove one that turned out to be damaged."""
        with self._changing:
            if artifact in self.artifacts:
                self._remove(artifact)

    def _retain(self, spare: frozenset[bytes]) -> list[Stored]:
        gone = [self._remove(artifact) for artifact in expendable(self.artifacts.values()) if artifact not in spare]
        if gone:
            used = {file.hash.hex() for s in self.artifacts.values() for file in s.manifest.files}
            for path in (self.root / "files").iterdir():
                if path.name not in used:
                    path.unlink(missing_ok=True)
        return gone

    # -- inside

    def _add(self, assembly: Assembly, path: Path) -> Stored:
        stored = Stored(assembly, path)
        self.artifacts = {**self.artifacts, stored.id: stored}
        return stored

    def _remove(self, artifact: bytes) -> Stored:
        stored = self.artifacts[artifact]
        self.artifacts = {a: s for a, s in self.artifacts.items() if a != artifact}
        if stored.path.is_dir():
            shutil.rmtree(stored.path, ignore_errors=True)
        else:
            stored.path.unlink(missing_ok=True)
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
