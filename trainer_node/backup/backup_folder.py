"""A backup of a run: one folder with copies of the hub's and the ledger's state.

    backup.json    {"backup": 1, "release", "run", "made_s", "hub": {…} or null, "ledger": {…} or null,
                    "files": {path: [bytes, BLAKE3 in hex]}}
    hub/  ledger/  files as in the state folders, without those that are made anew at each start
    restored.log   branches that were given to restored hubs (``p2pcast.files.append_log``)

Guarantees: the folder appears under its name only when every byte of it is durable. ``Backup.check`` finds a missing,
cut or changed file. The folder has mode 0700 and its files 0600, since it holds the run's keys.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError

FORMAT = 1
DOCUMENT = "backup.json"
RESTORED = "restored.log"
HUB, LEDGER = "hub", "ledger"
MAX_DOCUMENT_BYTES = 256 * limits.MIB
_COPY_BYTES = 64 * limits.MIB
_NO_DIRECT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Backup:
    """``run``: the run's id in hex, or None if no part knows it. ``hub``, ``ledger``: facts of each part, or None if
    the part is not in the backup. ``files``: size and BLAKE3 hash of each file, by its path below ``root``.
    """

    root: Path
    run: str | None
    hub: Mapping[str, Any] | None
    ledger: Mapping[str, Any] | None
    files: Mapping[str, tuple[int, str]]

    def check(self) -> None:
        """Compare every file with its hash. Raises IntegrityError."""
        for name, (size, digest) in self.files.items():
            path = self.root / name
            if not path.is_file() or path.is_symlink() or (path.stat().st_size, hashed(path)) != (size, digest):
                raise IntegrityError(f"{path} is missing or changed since the backup was made: use another backup")

    def part(self, name: str) -> list[str]:
        """Paths of a part's files, relative to its folder."""
        return [path.removeprefix(f"{name}/") for path in self.files if path.startswith(f"{name}/")]


def opened(root: Path) -> Backup:
    """Open a backup. Raises LocalError, and UsageError if there is none or it is incomplete."""
    path = root / DOCUMENT
    if not path.is_file():
        raise UsageError(f"{root} is no backup, or one that was not finished: it has no {DOCUMENT}")
    with explained("read", path), path.open("rb") as file:
        text = file.read(MAX_DOCUMENT_BYTES)
    try:
        body = json.loads(text)
        form = body["backup"]
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
        found = Backup(root, body["run"], body[HUB], body[LEDGER], files)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise IntegrityError(f"{path} is damaged: use another backup") from None
    if form != FORMAT:
        raise LocalError(f"{path} has format {form!r}, and this release reads {FORMAT}: use the release that wrote it")
    for name in files:
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or parts[0] not in (HUB, LEDGER):
            raise IntegrityError(f"{path} is damaged: it names the file {name!r}")
    return found


def document(root: Path, release: str, run: str | None, made_s: float, parts: Mapping[str, Any]) -> bytes:
    """Return the contents of ``backup.json`` for a folder that is otherwise complete."""
    files = {
        str(path.relative_to(root)): [path.stat().st_size, hashed(path)]
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    body = {"backup": FORMAT, "release": release, "run": run, "made_s": made_s, **parts, "files": files}
    return json.dumps(body, indent=1).encode()


def hashed(path: Path) -> str:
    with explained("read", path):
        return blake3.blake3().update_mmap(str(path)).hexdigest()


def copy_file(source: Path, target: Path, *, grow: bool = False) -> bool:
    """Copy a file up to its current length. Returns False if the file is gone. ``grow``: ``target`` already contains
    the beginning of an append-only file. Raises LocalError.
    """
    with explained("read", source):
        try:
            from_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
    try:
        found = os.fstat(from_fd)
        if not stat.S_ISREG(found.st_mode):
            raise LocalError(f"{source} is no regular file: remove it")
        with explained("write", target):
            disk.make_folder(target.parent)
            to_fd = disk.create(target, os.O_RDWR | (0 if grow else os.O_TRUNC))
            try:
                _copy(from_fd, to_fd, source, target, os.fstat(to_fd).st_size, found.st_size)
            finally:
                os.close(to_fd)
    finally:
        os.close(from_fd)
    return True


def _copy(from_fd: int, to_fd: int, source: Path, target: Path, done: int, size: int) -> None:
    direct = True
    while done < size:
        try:
            copied = disk.copy(from_fd, to_fd, target, done, min(size - done, _COPY_BYTES), direct=direct)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_COPY:
                raise
            direct = False
            continue
        if copied == 0:
            raise LocalError(f"{source} was cut short while it was copied: try again")
        done += copied


def copy_folder(source: Path, target: Path) -> bool:
    """Copy a folder whose contents never change. Returns False, and leaves nothing, if it was removed or replaced."""
    try:
        before = source.stat()
        complete = all(
            copy_file(path, target / path.relative_to(source))
            for path in sorted(source.rglob("*"))
            if not path.is_dir() or path.is_symlink()
        )
        complete = complete and os.path.samestat(before, source.stat())
    except FileNotFoundError:
        complete = False
    if not complete:
        with explained("clean", target):
            disk.remove(target)
    return complete


def top_files(state: Path, left_out: Collection[str]) -> list[Path]:
    """The files directly in a state folder, except hidden files and sockets."""
    with explained("read", state):
        return sorted(
            path
            for path in state.iterdir()
            if not path.name.startswith(".") and path.name not in left_out and path.is_file() and not path.is_symlink()
        )


def restore_files(backup: Backup, name: str, to: Path, left_out: Collection[str] = ()) -> None:
    """Copy a part's files to a new folder. Raises LocalError."""
    for path in backup.part(name):
        if path not in left_out and not copy_file(backup.root / name / path, to / path):
            raise LocalError(f"{backup.root / name / path} is gone: use another backup")
