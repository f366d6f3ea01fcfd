"""Small files of versions (configuration, tokenizer), each once, under the BLAKE3 of its contents in hex.

Promise: a file is there whole or not at all, and what does not match its hash is neither kept nor given.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import blake3

from p2pcast.artifact.records import FileEntry
from p2pcast.errors import IntegrityError
from p2pcast.store import disk
from p2pcast.store.files import atomic_write, explained
from p2pcast.version import Version


class SmallFiles:
    """In the folder ``root``, which is there. All methods raise LocalError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, file: FileEntry) -> Path:
        return self._root / file.hash.hex()

    def sweep(self) -> None:
        """What a process that died was writing. Raises OSError."""
        for path in self._root.glob(".*.part-*"):
            disk.unlink(path, missing_ok=True)

    def has(self, file: FileEntry, *, deep: bool = False) -> bool:
        """``deep``: its contents count, not its size alone."""
        path = self.path(file)
        with explained("read", path):
            if not path.is_file() or path.stat().st_size != file.size:
                return False
            return not deep or blake3.blake3(path.read_bytes()).digest() == file.hash

    def read(self, file: FileEntry, version: Version) -> bytes | None:
        """None where it never came here. ``version``: for which it is read. Raises IntegrityError on damage."""
        path = self.path(file)
        if not path.exists():
            return None
        with explained("read", path):
            contents = path.read_bytes()
        if blake3.blake3(contents).digest() != file.hash:
            raise IntegrityError(f"small file {file.path!r} of {version} is damaged: remove {path}")
        return contents

    def keep(self, contents: bytes) -> None:
        """Another that has its name, and so is damaged, is replaced."""
        path = self._root / blake3.blake3(contents).hexdigest()
        if not path.exists() or path.read_bytes() != contents:
            atomic_write(path, contents)

    def keep_as(self, contents: bytes, file: FileEntry) -> None:
        """Raises IntegrityError where it is not that file."""
        if blake3.blake3(contents).digest() != file.hash:
            raise IntegrityError(f"small file {file.path!r} does not match its hash")
        path = self.path(file)
        if not path.exists():
            atomic_write(path, contents)

    def drop_others(self, used: Collection[bytes]) -> None:
        """All but those with these hashes."""
        names = {each.hex() for each in used}
        for path in self._root.iterdir():
            if path.name not in names:
                with explained("remove", path):
                    disk.unlink(path, missing_ok=True)
