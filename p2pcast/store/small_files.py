"""Versions' small files (configuration, tokenizer), each stored once, named by the BLAKE3 hash of its contents in hex.

Guarantees: a file is complete or does not exist; contents that do not match their hash are not stored or returned.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import blake3

from p2pcast.artifact.signed_records import FileEntry
from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version


class SmallFiles:
    """Small files in the existing folder ``root``. All methods raise LocalError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, file: FileEntry) -> Path:
        return self._root / file.hash.hex()

    def sweep(self) -> None:
        """Remove a dead process's unfinished files. Raises OSError."""
        for path in self._root.glob(".*.part-*"):
            disk.unlink(path, missing_ok=True)

    def has(self, file: FileEntry, *, deep: bool = False) -> bool:
        """Whether the file is stored. ``deep``: compare its contents, not only its size."""
        path = self.path(file)
        with explained("read", path):
            if not path.is_file() or path.stat().st_size != file.size:
                return False
            return not deep or blake3.blake3(path.read_bytes()).digest() == file.hash

    def read(self, file: FileEntry, version: Version) -> bytes | None:
        """Return the contents, or None if the file is not stored. ``version``: for errors. Raises IntegrityError if
        damaged.
        """
        path = self.path(file)
        if not path.exists():
            return None
        with explained("read", path):
            contents = path.read_bytes()
        if blake3.blake3(contents).digest() != file.hash:
            raise IntegrityError(f"small file {file.path!r} of {version} is damaged: remove {path}")
        return contents

    def keep(self, contents: bytes) -> None:
        """Store contents, replacing a damaged file of the same name."""
        path = self._root / blake3.blake3(contents).hexdigest()
        with explained("read", path):
            known = path.exists() and path.read_bytes() == contents
        if not known:
            atomic_write(path, contents)

    def keep_as(self, contents: bytes, file: FileEntry) -> None:
        """Store contents as ``file``. Raises IntegrityError if they do not match its hash."""
        if blake3.blake3(contents).digest() != file.hash:
            raise IntegrityError(f"small file {file.path!r} does not match its hash")
        path = self.path(file)
        if not path.exists():
            atomic_write(path, contents)

    def drop_others(self, used: Collection[bytes]) -> None:
        """Remove all files except those with these hashes."""
        names = {each.hex() for each in used}
        with explained("read", self._root):
            paths = list(self._root.iterdir())
        for path in paths:
            if path.name not in names:
                with explained("remove", path):
                    disk.unlink(path, missing_ok=True)
