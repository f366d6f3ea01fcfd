"""The format of a state folder, and the lock that keeps other processes and older releases out.

Guarantees: a folder written by a later release is refused before anything changes, and the error names that release. An
earlier release's folder is upgraded in place. After a crash during the upgrade, either this release finishes it or the
earlier release can still open the folder. Release 0.1 refuses a folder in this format before changing anything.

    format       {"format": N, "release": "…"}: written last by an upgrade. Missing: format 1, of p2pcast 0.1, or a new
                 folder
    lock/daemon  locked (flock) by the process that works on the folder
    lock/FOR-…   tells a person why p2pcast 0.1 stops here: it opens ``lock`` as a file before anything else
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pcast.files import disk, private_folders
from p2pcast.files.atomic_files import atomic_write, explained, part_path
from p2pcast.ground.errors import LocalError
from p2pcast.ground.release import RELEASE
from p2pcast.store import folder_locks

FORMAT = 2
FIRST = 1
"""The format of p2pcast 0.1."""
FILE = "format"
LOCK = "lock"
HELD = "daemon"
NOTE = "FOR-P2PCAST-0.2-OR-LATER.txt"
_NOTE_TEXT = b"""The state folder in which this folder lies was written by p2pcast 0.2 or later.
p2pcast 0.1 ends with "cannot create .../lock: it is a folder, not a file", and has changed nothing.
Use p2pcast 0.2 or later, or a copy of the state folder from before the upgrade.
"""
MAX_FILE_BYTES = 4096
MARKS = (FILE, LOCK, "hub.json", "peer.json", "run.key", "token.key", "trust.json", "http.token", "deltas", "partial")
"""Names each of which marks the folder it is in as a daemon's state."""
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
"""Errors that mean that a different process put its own lock there, or removed this process's lock as a leftover."""

Migrate = Callable[[Path], None]

STEPS: dict[int, Migrate] = {}
"""Format → function that upgrades a folder to the next format, except for its lock and format file.

A step runs again after a crash, so each step must be idempotent.
"""


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A folder's format. ``release``: the release that wrote it."""

    format: int
    release: str


def read_format(state: Path) -> FolderFormat:
    """Return the folder's stated format; one that states none has the first format, or is new. Raises LocalError."""
    path = state / FILE
    with explained("read", path):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return FolderFormat(FIRST, "0.1")
    try:
        found = json.loads(text)
        made = FolderFormat(found["format"], found["release"])
    except (ValueError, TypeError, KeyError):
        made = FolderFormat(0, "")
    if type(made.format) is not int or made.format < FIRST or type(made.release) is not str:
        raise LocalError(f"{path} is damaged: restore it from a copy of the state folder")
    return made


def check(state: Path) -> FolderFormat:
    """Raise LocalError if a later release has written the folder."""
    found = read_format(state)
    if found.format > FORMAT:
        raise LocalError(
            f"state folder {state} has format {found.format}, of p2pcast {found.release[:64]}; "
            f"this is p2pcast {RELEASE}, which opens formats {FIRST} to {FORMAT}: "
            f"use p2pcast {found.release[:64]} or later, or a copy of the folder from before the upgrade"
        )
    return found


@contextlib.contextmanager
def state_lock(state: Path, *, upgrade: bool = True) -> Iterator[None]:
    """Lock the folder for this process and user, upgraded to this release's format unless ``upgrade`` is False.

    Raises LocalError.
    """
    check(state)
    os.close(private_folders.own_folder(state, MARKS))
    with explained("create", state / LOCK):
        fd = _acquire(state, upgrade)
    try:
        found = check(state)  # again: another process may have changed the folder meanwhile
        if upgrade:
            _upgrade(state, found)
        yield
    finally:
        os.close(fd)


def is_in_use(state: Path) -> bool:
    """Whether a process uses the folder, or may use it because the lock cannot be read."""
    lock = state / LOCK
    try:
        return folder_locks.is_locked(lock / HELD if lock.is_dir() and not lock.is_symlink() else lock)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _upgrade(state: Path, found: FolderFormat) -> None:
    with explained("clean", state):
        for name in (LOCK, FILE):
            for left in state.glob(f".{name}.part-*"):
                disk.remove(left)
    if found.format < FORMAT or not (state / FILE).exists():
        for number in range(found.format, FORMAT):
            if (step := STEPS.get(number)) is not None:
                step(state)
        text = json.dumps({"format": FORMAT, "release": RELEASE}) + "\n"
        atomic_write(state / FILE, text.encode(), 0o600)


# -- the lock


def _acquire(state: Path, upgrade: bool) -> int:
    """Return a descriptor that holds the lock. Raises LocalError and OSError."""
    lock = state / LOCK
    while True:
        if lock.is_dir() and not lock.is_symlink():
            return _held(_opened(lock / HELD), state)
        if not upgrade:
            return _held(_opened(lock), state)
        old = _held(_opened(lock), state) if lock.exists() else None
        try:
            # If the file was replaced before it was locked, the lock does not exclude anyone.
            if old is None or _is_at(old, lock):
                new = _replace(lock, state)
                if new is not None:
                    return new
        finally:
            if old is not None:
                os.close(old)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _held(fd: int, state: Path) -> int:
    try:
        folder_locks.lock(fd)
    except OSError:
        os.close(fd)
        raise LocalError(
            f"state folder {state} is in use by another p2pcast daemon; give this one its own with --state"
        ) from None
    return fd


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _replace(lock: Path, state: Path) -> int | None:
    """Replace the lock file by the locked folder. Returns None if a different process was faster."""
    part = part_path(lock)
    disk.mkdir(part)
    fd = -1
    try:
        os.chmod(part, 0o700)
        _write(part / NOTE, _NOTE_TEXT)
        fd = _held(_opened(part / HELD), state)
        disk.sync_folder(part)
        if not lock.exists():
            disk.rename(part, lock)
        elif not disk.exchange(part, lock):
            disk.unlink(lock)
            disk.rename(part, lock)
        disk.sync_folder(state)
        disk.remove(part)
        return fd
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                disk.remove(part)
            if error.errno in _IN_THE_WAY:
                return None
        raise


def _write(path: Path, text: bytes) -> None:
    fd = disk.create(path, os.O_WRONLY | os.O_EXCL, 0o600)
    try:
        disk.write(fd, path, text)
        disk.sync(fd, path)
    finally:
        os.close(fd)
