"""The form of a state folder, and the lock that keeps other processes and older releases out of it.

Promises: a folder that a later release has written is refused before anything in it is changed, and the error names that release; a folder of an earlier release is
upgraded in place, and a crash during the upgrade leaves a folder that this release finishes, or that the earlier release still opens; p2pcast 0.1 refuses a
folder of this form before it changes anything.

    format               {"format": N, "release": "…"}: written last by an upgrade. Missing: format 1, of p2pcast 0.1, or a folder that is new
    lock/daemon          locked (flock) by the process that works on the folder
    lock/FOR-…           says to a person why p2pcast 0.1 stops here: it opens ``lock`` as a file, before all else
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pcast.errors import LocalError
from p2pcast.release import RELEASE
from p2pcast.store import disk, private
from p2pcast.store.files import atomic_write, explained, part_path

FORMAT = 2
FIRST = 1
"""Of p2pcast 0.1."""
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
"""A folder that holds one of these is a daemon's state."""
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
"""Another process has put its own lock there, or taken ours for left over."""

Migrate = Callable[[Path], None]

STEPS: dict[int, Migrate] = {}
"""Format → the function that turns a folder of that format into the next one; lock and format file aside. After a crash a step runs again, so each must be repeatable."""


@dataclass(frozen=True, slots=True)
class Written:
    """``release``: the one that brought the folder to this format."""

    format: int
    release: str


def written(state: Path) -> Written:
    """The format that the folder names; a folder that names none is of the first format, or new. Raises LocalError."""
    path = state / FILE
    with explained("read", path):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return Written(FIRST, "0.1")
    try:
        found = json.loads(text)
        made = Written(found["format"], found["release"])
    except (ValueError, TypeError, KeyError):
        made = Written(0, "")
    if type(made.format) is not int or made.format < FIRST or type(made.release) is not str:
        raise LocalError(f"{path} is damaged: restore it from a copy of the state folder")
    return made


def check(state: Path) -> Written:
    """Raises LocalError where a later release has written the folder."""
    found = written(state)
    if found.format > FORMAT:
        raise LocalError(
            f"state folder {state} has format {found.format}, of p2pcast {found.release[:64]}; this is p2pcast {RELEASE}, which opens formats "
            f"{FIRST} to {FORMAT}: use p2pcast {found.release[:64]} or later, or a copy of the folder from before the upgrade"
        )
    return found


@contextlib.contextmanager
def state_lock(state: Path, *, upgrade: bool = True) -> Iterator[None]:
    """The folder for this process alone, and for no other user, in this release's form (``upgrade`` False: in the form that it has). Raises LocalError."""
    check(state)
    os.close(private.own_folder(state, MARKS))
    with explained("create", state / LOCK):
        fd = _take(state, upgrade)
    try:
        found = check(state)  # again: another process may have been at it meanwhile
        if upgrade:
            _upgrade(state, found)
        yield
    finally:
        os.close(fd)


def _upgrade(state: Path, found: Written) -> None:
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


def _take(state: Path, upgrade: bool) -> int:
    """A descriptor that holds the lock. Raises LocalError, OSError."""
    lock = state / LOCK
    while True:
        if lock.is_dir() and not lock.is_symlink():
            return _held(_opened(lock / HELD), state)
        if not upgrade:
            return _held(_opened(lock), state)
        old = _held(_opened(lock), state) if lock.exists() else None
        try:
            # A lock on a file that was replaced before it was locked keeps no process out.
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
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Put the folder, locked already, in the place of the file. None where another process was faster."""
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
