"""A state folder's contents, examined from outside: versions, sizes, and whether every byte matches its signature.

Only ``set_aside`` changes files. The records may be read while a daemon is running. To read every byte, or to set files
aside, the caller must hold the folder's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blake3

from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import ANCHOR, DELTA, run_id
from p2pcast.files import disk
from p2pcast.files.atomic_files import explained, part_path
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, Gap, find_gap
from p2pcast.relay.daemon_metrics import STORE_PARTS, disk_bytes
from p2pcast.store import anchor_folder, artifact_journal
from p2pcast.store.anchor_log import AnchorLog

DAMAGED = "damaged"
"""Folder for unusable files (``set_aside``)."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Item:
    """A sealed artifact. ``fault``: why it is unusable, or None."""

    path: Path
    kind: str
    version: Version | None
    base: Version | None
    log_bytes: int
    state: int | None
    fault: str | None = None
    assembly: Assembly | None = None


@dataclass
class Survey:
    root: Path
    role: str
    """hub or peer."""
    run: str | None
    """The run's id in hex; None if unknown."""
    key: bytes | None
    record: dict[str, object]
    items: list[Item] = field(default_factory=list)
    partial: list[tuple[Path, Version | None]] = field(default_factory=list)
    """Partially received artifacts, with their version if their records state one."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes on disk of each part."""
    faults: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def newest(self) -> Version | None:
        return max((i.version for i in self.items if i.version is not None and i.fault is None), default=None)

    def gap(self, shadow: str | None) -> Gap | None:
        """Why the artifacts do not lead to the newest version. ``shadow``: the version of the daemon's shadow. New
        peers begin from nothing, so at a hub the shadow does not count. A peer may have begun from a base folder.
        """
        edges = [Edge(b"", i.base, i.version, 0) for i in self.items if i.version is not None and i.fault is None]
        if self.role == "hub":
            return find_gap(None, edges)
        oldest = min((edge.base or edge.version for edge in edges), default=None)
        return find_gap(oldest if shadow is None else Version.parse(shadow), edges)

    def missing_files(self) -> list[str]:
        """Small files of the newest version that are not on this disk."""
        newest = [i.assembly.manifest for i in self.items if i.assembly is not None and i.version == self.newest]
        files = newest[0].files if newest and newest[0] is not None else ()
        return [file.path for file in files if not (self.root / "files" / file.hash.hex()).exists()]


def is_state_folder(path: Path) -> bool:
    return (
        (path / "deltas").is_dir()
        and (path / "anchors").is_dir()
        and ((path / "run.key").exists() or (path / "peer.json").exists())
    )


def survey(root: Path, *, deep: bool = False, progress: Progress = lambda count: None) -> Survey:
    """Examine a state folder. Raises LocalError if the folder itself can't be read.

    ``deep``: read every byte and compare it with its signed hash.
    """
    if not is_state_folder(root):
        raise LocalError(
            f"{root} is not a state folder of a hub or a peer: "
            "deltas/, anchors/, or both run.key and peer.json are missing"
        )
    hub = (root / "run.key").exists()
    record = _read_role_record(root / ("hub.json" if hub else "peer.json"))
    key = RunKey.load_or_create(root / "run.key").public if hub else None
    found = Survey(root, "hub" if hub else "peer", None, key, record[0])
    found.faults += record[1]
    for path in _names(root / "deltas", "*.p2pd"):
        _add_item(found, _delta(path, found.key, deep, progress))
    for path in _names(root / "anchors", "*"):
        _add_item(found, _anchor(path, found.key, deep, progress))
    for path in _names(root / "files", "*"):
        if deep and (fault := _small_file_fault(path)) is not None:
            found.faults.append((path, fault))
    for path in _names(root / "partial", f"*{artifact_journal.SUFFIX}"):
        found.partial.append(
            (path.with_name(path.name.removesuffix(artifact_journal.SUFFIX)), _partial_version(path, found.key))
        )
    found.run = None if found.key is None else run_id(found.key).hex()
    found.sizes = {part: disk_bytes(root / part) for part in STORE_PARTS}
    return found


def set_aside(found: Survey) -> list[Path]:
    """Move unusable files to ``damaged/``, without removing any; a daemon fetches or makes them again. Returns the new
    paths.

    Raises LocalError.
    """
    moved: list[Path] = []
    for path, _ in found.faults:
        if path.parent.name not in STORE_PARTS:
            continue
        target = found.root / DAMAGED / path.name
        with explained("set aside", path):
            disk.make_folder(target.parent)
            if target.exists():
                target = part_path(target)
            disk.rename(path, target)
            disk.sync_folder(path.parent)
            disk.sync_folder(target.parent)
        moved.append(target)
    return moved


def _add_item(found: Survey, item: Item) -> None:
    found.items.append(item)
    if item.fault is not None:
        found.faults.append((item.path, item.fault))
    elif found.key is None and item.assembly is not None:
        found.key = item.assembly.public


def _names(folder: Path, pattern: str) -> Iterator[Path]:
    with explained("read", folder):
        return iter(
            sorted(path for path in folder.glob(pattern) if not path.name.startswith(".")) if folder.is_dir() else []
        )


def _read_role_record(path: Path) -> tuple[dict[str, object], list[tuple[Path, str]]]:
    try:
        with explained("read", path):
            return json.loads(path.read_text()), []
    except ValueError:
        return {}, [(path, f"{path} is damaged: restore it from a copy, or remove it")]
    except LocalError as error:
        return {}, [(path, str(error))]


def _delta(path: Path, key: bytes | None, deep: bool, progress: Progress) -> Item:
    try:
        with P2pdFile.open(path, key) as file:
            if deep:
                file.verify_pieces()
                progress(file.manifest.log)
            manifest = file.manifest
            return Item(path, DELTA, manifest.version, manifest.base, manifest.log, manifest.state, None, file.assembly)
    except P2PCastError as error:
        return Item(path, DELTA, None, None, 0, None, str(error))


def _anchor(path: Path, key: bytes | None, deep: bool, progress: Progress) -> Item:
    try:
        assembly = anchor_folder.read_record(path, key)
        manifest = assembly.manifest
        assert manifest is not None
        log = AnchorLog(path, assembly.layout)
        log.add_files(manifest)
        try:
            for piece in range(assembly.pieces if deep else 0):
                size = assembly.piece_bytes(piece) or 0
                if blake3.blake3(log.read(piece * assembly.open.piece, size)).digest() != assembly.piece_hash(piece):
                    raise IntegrityError(
                        f"{path}: damaged: piece {piece} (of {assembly.open.piece} bytes) does not match its hash"
                    )
                progress(size)
        finally:
            log.close()
        return Item(path, ANCHOR, manifest.version, None, manifest.log, manifest.state, None, assembly)
    except P2PCastError as error:
        return Item(path, ANCHOR, None, None, 0, None, str(error))


def _small_file_fault(path: Path) -> str | None:
    try:
        with explained("read", path):
            if blake3.blake3(path.read_bytes()).digest().hex() != path.name:
                return f"{path}: damaged: its contents do not match its name, which is their hash"
    except LocalError as error:
        return str(error)
    return None


def _partial_version(path: Path, key: bytes | None) -> Version | None:
    if key is None:
        return None
    try:
        assembly = artifact_journal.inspect(path, key)
    except P2PCastError:
        return None
    return None if assembly is None else assembly.open.version
