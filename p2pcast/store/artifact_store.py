"""A node's artifacts on disk: sealed deltas (``.p2pd`` files), anchors (Hugging Face folders), and small files by hash.

Promises:

- An artifact gets its name only once it is complete and durable.
- An artifact that is being replaced keeps its name until then.

Artifacts that were being received when a process died are resumed (``resume``) or removed on the next start. An
artifact is opened only if its signatures match. Synchronous: daemons call the store from an executor.

    deltas/<branch>.<step>-<artifact, 8 hex digits>.p2pd
    anchors/<branch>.<step>/          files/<BLAKE3, hex>
    partial/<artifact, hex>           partial/<artifact, hex>.records (``store.artifact_journal``)
    partial/<branch>.<step>.replaced  partial/<artifact, hex>.excerpt
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from p2pcast.artifact.artifact_file import FOOTER_BYTES, HEADER, P2pdFile, Tail, footer
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import ANCHOR, DELTA, FileEntry, Manifest, Open, run_id
from p2pcast.codec.layout import Cell, Layout
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained, fsync_dir
from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.store import anchor_folder, artifact_journal, partial_artifact
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.artifact_journal import ArtifactJournal
from p2pcast.store.artifact_log import ArtifactLog, FileLog
from p2pcast.store.partial_artifact import PartialArtifact
from p2pcast.store.retention import DEFAULT, RetentionCounts, dispensable, expendable
from p2pcast.store.small_files import SmallFiles

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


class ArtifactStore:
    """``run_key``: the run's public key. ``counts``: how many artifacts retention keeps."""

    def __init__(
        self, root: Path, run_key: bytes, *, keep_partial: bool = False, counts: RetentionCounts = DEFAULT
    ) -> None:
        """Open the folder and list its complete artifacts. Raises LocalError.

        ``keep_partial``: keep partially received artifacts, for ``resume``.
        """
        self.root = root
        self.run_key = run_key
        self._counts = counts
        self.damaged: list[tuple[Path, str]] = []
        """Unusable files, each with the reason; they are left in place."""
        self.artifacts: Mapping[bytes, Stored] = {}
        """Replaced as a whole on every change, since other threads may be reading it."""
        self._files = SmallFiles(root / "files")
        self._noted: Manifest | None = None
        self._changing = threading.Lock()
        """Several artifacts may be sealed at once; retention must keep the small files of a version being sealed."""
        with explained("create", root):
            for name in ("deltas", "anchors", "files", "partial"):
                disk.make_folder(root / name)
        with explained("clean", root / "partial"):
            self._put_back()
            self._sweep(keep_partial)
        for path in sorted((root / "deltas").glob("*.p2pd")):
            self._load(path, self._load_delta)
        for path in sorted((root / "anchors").iterdir()):
            if (path / anchor_folder.RECORD).is_file():
                self._load(path, self._load_anchor)
            else:
                # An anchor's record is written before its final name.
                with explained("clean", path):
                    disk.remove(path)

    def _put_back(self) -> None:
        """Restore an anchor whose replacement was interrupted by a crash."""
        for aside in (self.root / "partial").glob(f"*{REPLACED}"):
            final = self.root / "anchors" / aside.name.removesuffix(REPLACED)
            if not final.exists():
                disk.rename(aside, final)
                disk.sync_folder(final.parent)

    def _sweep(self, keep_partial: bool) -> None:
        names = {path.name for path in (self.root / "partial").iterdir()}
        for name in names:
            stem = name.removesuffix(artifact_journal.SUFFIX)
            if not (keep_partial and {stem, f"{stem}{artifact_journal.SUFFIX}"} <= names):
                disk.remove(self.root / "partial" / name)
        self._files.sweep()

    # -- reading

    def open_log(self, stored: Stored) -> ArtifactLog:
        if stored.kind == DELTA:
            return FileLog(stored.path, len(HEADER))
        log = AnchorLog(stored.path, stored.assembly.layout)
        log.add_files(stored.manifest)
        return log

    def holds(self, artifact: bytes) -> bool:
        return artifact in self.artifacts

    def versions(self) -> set[Version]:
        return {s.version for s in self.artifacts.values()}

    def deltas(self) -> list[tuple[Version, Version, int]]:
        """Return base, version and size in bytes of every delta and squash."""
        return [(s.base, s.version, s.manifest.log) for s in self.artifacts.values() if s.base is not None]

    def newest(self) -> Version | None:
        return max(self.versions(), default=None)

    def manifest(self, version: Version) -> Manifest | None:
        """Return any manifest of a version; all of them agree on its state and files."""
        stored = next((s.manifest for s in self.artifacts.values() if s.version == version), None)
        return self._noted if stored is None and self._noted is not None and self._noted.version == version else stored

    def identity(self, version: Version) -> bytes | None:
        """Return the version's hash if an artifact in this store states it, else None."""
        return next(
            (s.manifest.identity for s in self.artifacts.values() if s.version == version and s.manifest.identity), None
        )

    def note(self, manifest: Manifest) -> None:
        """Remember the manifest of a version that has no artifact in this store, for its small files."""
        self._noted = manifest

    def missing_files(self, version: Version, *, deep: bool = False) -> list[FileEntry]:
        """Return a version's missing small files. Its manifest must be known. ``deep``: compare contents, not only
        sizes.

        Raises LocalError.
        """
        manifest = self.manifest(version)
        assert manifest is not None
        return [file for file in manifest.files if not self._files.has(file, deep=deep)]

    def small_files(self, version: Version) -> dict[str, bytes]:
        """Return path → contents of a version's small files, except missing ones. Raises IntegrityError on damage."""
        manifest = self.manifest(version)
        out: dict[str, bytes] = {}
        for file in manifest.files if manifest is not None else ():
            if (contents := self._files.read(file, version)) is not None:
                out[file.path] = contents
        return out

    def all_files(self, version: Version, *, but: Collection[str] = ()) -> dict[str, bytes]:
        """Like ``small_files``, but without the paths ``but``. Raises LocalError if any other file is missing, so that
        later versions do not lose it.
        """
        if self.manifest(version) is None:
            return {}
        for file in self.missing_files(version):
            if file.path not in but:
                raise LocalError(
                    f"{self.root} has lost the small file {file.path!r} of {version}: publish the next version with it"
                )
        return {path: contents for path, contents in self.small_files(version).items() if path not in but}

    def small_file(self, version: Version, path: str) -> bytes | None:
        """Return the contents of one small file, or None if the version does not have it. Raises RetryableError if it
        is missing here.
        """
        manifest = self.manifest(version)
        file = next((f for f in manifest.files if f.path == path), None) if manifest is not None else None
        if file is None:
            return None
        if (contents := self._files.read(file, version)) is None:
            raise RetryableError(f"the small file {path!r} of {version} is not here yet")
        return contents

    def hashes_of(self, path: str) -> dict[Version, bytes]:
        """Return the BLAKE3 hash of the small file at ``path`` for each version in the store that has one."""
        manifests = [stored.manifest for stored in self.artifacts.values()]
        manifests += [] if self._noted is None else [self._noted]
        return {m.version: found for m in manifests if (found := m.file_hash(path)) is not None}

    def keep_files(self, contents: dict[str, bytes]) -> None:
        """Store small files by hash, for ``small_files``."""
        for data in contents.values():
            self._files.keep(data)

    # -- receiving

    def begin(self, open_: Open, layout: Layout, *, resumable: bool = False) -> ArtifactLog:
        """Return a log for an artifact to receive; its first write creates the file. ``resumable``: ``note`` stores the
        records that ``resume`` needs.
        """
        path = self.root / "partial" / open_.artifact.hex()
        notes = ArtifactJournal(self._journal(open_.artifact), layout) if resumable else None
        if open_.kind == ANCHOR:
            return AnchorLog(path, layout, create=True, journal=notes)
        return FileLog(path, len(HEADER), head=HEADER, journal=notes)

    def begin_excerpt(self, open_: Open) -> ArtifactLog:
        """Return a log for a few pieces of an artifact at any offsets, in a sparse file. A file left by a dead process
        is removed on the next start.
        """
        return FileLog(self._open_excerpt(open_.artifact), 0, head=b"")

    def end_excerpt(self, log: ArtifactLog, artifact: bytes) -> None:
        log.close()
        with explained("remove", self._open_excerpt(artifact)):
            disk.remove(self._open_excerpt(artifact))

    def _open_excerpt(self, artifact: bytes) -> Path:
        return self.root / "partial" / f"{artifact.hex()}{EXCERPT}"

    def resume(self, workers: int = 1) -> list[PartialArtifact]:
        """Return an earlier process's partial artifacts, after reading and verifying every piece on disk. Call this
        once. Raises LocalError.
        """
        return partial_artifact.resume(self.root / "partial", self.run_key, self.artifacts, workers)

    def _journal(self, artifact: bytes) -> Path:
        return self.root / "partial" / f"{artifact.hex()}{artifact_journal.SUFFIX}"

    def seal(self, log: ArtifactLog, assembly: Assembly, durable: bytes | None = None) -> Stored:
        """Make a complete log durable under its name. The log stays readable. Raises LocalError and IntegrityError. If
        this machine was short of a resource, it may be called again.

        ``durable``: the hub's own durable record, whose statement is true once this method has returned.
        """
        with self._changing:
            return self._seal(log, assembly, durable)

    def _seal(self, log: ArtifactLog, assembly: Assembly, durable: bytes | None) -> Stored:
        manifest = assembly.manifest
        assert manifest is not None
        for file in manifest.files:
            if file.offset is not None:
                self._files.keep_as(log.read(file.offset, file.size), file)
        tail = Tail.of(assembly, durable).to_bytes()
        part = self.root / "partial" / assembly.open.artifact.hex()
        if isinstance(log, AnchorLog):
            final = self.root / "anchors" / str(manifest.version)
            if part.exists():
                anchor_folder.finish(part, log, manifest)
                anchor_folder.write_record(part, tail)
                self._rename_anchor(part, final)
            log.renamed(final)
        else:
            assert isinstance(log, FileLog)
            final = self.root / "deltas" / f"{manifest.version}-{manifest.artifact.hex()[:8]}.p2pd"
            if log.path != final:
                with log.descriptor() as fd, explained("write", part):
                    end = len(HEADER) + manifest.log
                    disk.write_at(fd, part, [tail, footer(tail)], end)
                    disk.resize(fd, part, end + len(tail) + FOOTER_BYTES)
                    try:
                        disk.sync(fd, part)
                    except OSError as error:
                        # Whatever the reason, the kernel may have dropped data that it could not write.
                        raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
                    disk.rename(part, final)
                    log.renamed(final)
        fsync_dir(final.parent)
        if log.journal is not None:
            log.journal.close()
            with explained("clean", log.journal.path):
                disk.unlink(log.journal.path, missing_ok=True)
        return self._add(assembly, final)

    def _rename_anchor(self, part: Path, final: Path) -> None:
        """Rename a complete, synced anchor. An older anchor of that name is kept until then; after a crash, the next
        start restores it.
        """
        aside = self.root / "partial" / f"{final.name}{REPLACED}"
        with explained("write", final):
            if final.exists():
                disk.remove(aside)
                disk.rename(final, aside)
            disk.rename(part, final)
        fsync_dir(final.parent)
        with explained("clean", aside):
            disk.remove(aside)

    def abandon(self, log: ArtifactLog, artifact: bytes) -> None:
        log.close()
        part = self.root / "partial" / artifact.hex()
        with explained("remove", part):
            disk.remove(self._journal(artifact))
            disk.remove(part)

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
        version_hash: bytes | None = None,
    ) -> Stored:
        """Write a whole state as a signed anchor folder, and list it.

        ``digests``: one u64 per cell; ``version_hash``: as in ``Manifest``. Raises LocalError, and IntegrityError if
        the words from ``words_of`` do not match their digest.
        """
        piece = piece_bytes(layout.nbytes, anchor=True)
        record = Open(artifact, None, ANCHOR, layout.layout_id, piece, run_id(key.public), version)
        final, part = self.root / "anchors" / str(version), self.root / "partial" / artifact.hex()
        try:
            tail = anchor_folder.write(part, key, record, layout, words_of, digests, files, version_hash)
            self.keep_files(files)
            assembly = tail.assembly(layout)
            anchor_folder.write_record(part, tail.to_bytes())
            with self._changing:
                self._rename_anchor(part, final)
                return self._add(assembly, final)
        except BaseException:
            with suppress(OSError):
                disk.remove(part)
            raise

    # -- retention

    def retain(self, spare: frozenset[bytes] = frozenset()) -> list[Stored]:
        """Remove and return the expendable artifacts, except those in ``spare``."""
        aside: list[Path] = []
        with self._changing:
            gone = self._retain(spare, aside)
        _remove_all(aside)
        return gone

    def make_room(self, need_bytes: float, spare: frozenset[bytes] = frozenset()) -> list[Stored]:
        """Remove dispensable squashes, except those in ``spare``, until ``need_bytes`` are free or none is left.
        Returns the removed ones. Raises LocalError.
        """
        gone: list[Stored] = []
        with self._changing:
            for artifact in dispensable(self.artifacts.values()):
                if self.free_bytes() >= need_bytes:
                    break
                if artifact not in spare:
                    gone.append(self._remove(artifact, []))
        return gone

    def free_bytes(self) -> float:
        """Return the free disk space for artifacts in bytes. Raises LocalError."""
        with explained("measure", self.root):
            return disk.free_bytes(self.root)

    def discard(self, artifact: bytes, *, contradicted: bool = False) -> None:
        """Remove a damaged artifact. Its signed statements about its version remain known.

        ``contradicted``: the run has a different version with this number, so the statements are forgotten too.
        """
        aside: list[Path] = []
        with self._changing:
            if artifact in self.artifacts:
                manifest = self._remove(artifact, aside).manifest
                if contradicted:
                    self._noted = (
                        None if self._noted is not None and self._noted.version == manifest.version else self._noted
                    )
                elif self._noted is None or manifest.version > self._noted.version:
                    self._noted = manifest
        _remove_all(aside)

    def _retain(self, spare: frozenset[bytes], aside: list[Path]) -> list[Stored]:
        late = expendable(self.artifacts.values(), self._counts)
        gone = [self._remove(artifact, aside) for artifact in late if artifact not in spare]
        if gone:
            manifests = [s.manifest for s in self.artifacts.values()] + ([] if self._noted is None else [self._noted])
            self._files.drop_others({file.hash for manifest in manifests for file in manifest.files})
        return gone

    # -- internals

    def _add(self, assembly: Assembly, path: Path) -> Stored:
        stored = Stored(assembly, path)
        self.artifacts = {**self.artifacts, stored.id: stored}
        return stored

    def _remove(self, artifact: bytes, aside: list[Path]) -> Stored:
        """Remove an artifact. A folder is only renamed and appended to ``aside``; the caller removes it later, since
        that is slow.
        """
        stored = self.artifacts[artifact]
        self.artifacts = {a: s for a, s in self.artifacts.items() if a != artifact}
        with explained("remove", stored.path):
            if stored.path.is_dir():
                # Rename first, so that readers never see a partial artifact.
                gone = self.root / "partial" / f"{stored.path.name}-{secrets.token_hex(4)}{GONE}"
                disk.rename(stored.path, gone)
                aside.append(gone)
            else:
                disk.unlink(stored.path, missing_ok=True)
        return stored

    def _load(self, path: Path, load: Callable[[Path], None]) -> None:
        try:
            load(path)
        except P2PCastError as error:
            self.damaged.append((path, str(error)))

    def _load_delta(self, path: Path) -> None:
        with P2pdFile.open(path, self.run_key) as file:
            self._add(file.assembly, path)

    def _load_anchor(self, path: Path) -> None:
        self._add(anchor_folder.read(path, self.run_key), path)


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        with explained("remove", path):
            disk.remove(path)
