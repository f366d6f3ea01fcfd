"""Determines which state folder a shadow belongs to, and which shadows in tmpfs no daemon uses or will open again.

A shadow deliberately outlives its process: the next start with the same state folder continues with it. So each shadow
folder names its state folder (``owner.json``), and each state folder names its shadow (``shadow.json``); both contain
the same random id.

Guarantee: ``remove`` removes a folder only if it belongs to this user, no process has it locked, and its record proves
that it is stale. A shadow is stale if its state folder is gone from a file system that is still mounted, or now names a
different shadow. A folder without a record is listed but never removed. ``remove_unused`` also removes a shadow that a
daemon may use again, which only makes that daemon start more slowly. A shadow whose state folder is locked stays.

A shadow has been unused since the time of its file ``unused``, which a daemon creates on exit and removes on startup.
If a daemon was killed, the next ``sweep`` by another daemon creates the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.files import disk, private_folders
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import LocalError
from p2pcast.ground.limits import KIB, SHADOW_KEPT_DAYS
from p2pcast.process.daemon_process import TMPFS, shadow_prefix
from p2pcast.state.shadow import MODEL_NAME, locked
from p2pcast.store import folder_locks
from p2pcast.store.state_format import is_in_use

logger = logging.getLogger("p2pcast.state")

OWNER_NAME = "owner.json"
"""The record in the shadow's folder."""
CLAIM_NAME = "shadow.json"
"""The record in the state folder."""
UNUSED_NAME = "unused"
"""An empty file in the shadow's folder."""
DAY_S = 86400.0
MAX_RECORD_BYTES = 16 * KIB
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class StaleShadow:
    """``proved``: whether it is certain that no daemon will open the folder again. ``reason``: text for people."""

    folder: Path
    nbytes: int
    proved: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FoundShadow:
    """``state``: the state folder that the shadow names, if any. ``state_exists``: None for a shadow from a different
    container. ``unused_s``: seconds since its daemon exited; None if it is in use or that time is unknown.
    """

    folder: Path
    nbytes: int
    state: Path | None
    state_exists: bool | None
    in_use: bool
    unused_s: float | None


def claim(state: Path, shadow: Path) -> None:
    """Make ``shadow`` the shadow folder of ``state``, which this process has locked.

    Raises LocalError if the folder is in use, or accessible to other users.
    """
    state, shadow = state.resolve(), shadow.absolute()
    lock = locked(shadow, make=True)
    try:
        known = _read(state / CLAIM_NAME)
        if known.get("folder") != str(shadow) or not isinstance(known.get("id"), str):
            known = {"folder": str(shadow), "id": secrets.token_hex(ID_BYTES)}
            atomic_write(state / CLAIM_NAME, json.dumps(known).encode())
        record = {"state": str(state), "id": known["id"], "device": state.stat().st_dev, "root": _root()}
        if _read(shadow / OWNER_NAME) != record:
            atomic_write(shadow / OWNER_NAME, json.dumps(record).encode())
        disk.unlink(shadow / UNUSED_NAME, missing_ok=True)
    finally:
        os.close(lock)


def leave(shadow: Path) -> None:
    """On exit, note that this process no longer uses the shadow, and log how much memory the shadow keeps."""
    try:
        nbytes = _mark_unused(shadow)
        if nbytes and (shadow / MODEL_NAME).exists():
            logger.info(
                "the shadow stays in memory for a quick start: %.2f GB in %s; `p2pcast clean` removes it",
                nbytes / 1e9,
                shadow,
            )
    except OSError as error:
        logger.debug("the shadow %s is not noted as unused: %s", shadow, error)


def find_all(tmpfs: Path = TMPFS) -> Iterator[FoundShadow]:
    """Yield this user's shadows below ``tmpfs``, whether in use or not."""
    for folder in _folders(tmpfs):
        with contextlib.suppress(OSError):
            record = _read(folder / OWNER_NAME)
            state = Path(record["state"]) if isinstance(record.get("state"), str) else None
            here = state is not None and record.get("root") == _root()
            in_use = _in_use(folder)
            yield FoundShadow(
                folder,
                _size(folder),
                state,
                state.is_dir() if here and state is not None else None,
                in_use,
                None if in_use else _unused_s(folder),
            )


def find_stale(tmpfs: Path = TMPFS) -> Iterator[StaleShadow]:
    """Yield this user's folders below ``tmpfs`` that no known state folder will use again."""
    for folder in _folders(tmpfs):
        with contextlib.suppress(OSError):
            if (found := _judge(folder)) is not None:
                proved, reason = found
                yield StaleShadow(folder, _size(folder), proved, reason)


def remove(left: StaleShadow) -> bool:
    """Delete a shadow if it is still provably stale and no process holds its lock. Returns whether it was deleted."""

    def proved() -> bool:
        found = _judge(left.folder)
        return found is not None and found[0]

    return _remove(left.folder, proved)


def remove_unused(folder: Path, for_s: float = 0.0) -> bool:
    """Delete a shadow that has a record and has been unused for ``for_s`` seconds. Returns whether it was deleted. If
    it is unknown when its daemon exited, ``for_s`` must be 0.
    """

    def unused() -> bool:
        state = _read(folder / OWNER_NAME).get("state")
        return isinstance(state, str) and not is_in_use(Path(state)) and (_unused_s(folder) or 0.0) >= for_s

    return _remove(folder, unused)


def _remove(folder: Path, may: Callable[[], bool]) -> bool:
    """Delete the folder if ``may``, called under the folder's lock, agrees."""
    try:
        lock = locked(folder)
    except LocalError:
        return False
    try:
        if not may():
            return False
        gone = folder.with_name(f"{_gone()}{secrets.token_hex(ID_BYTES)}")
        # Rename before deleting, so that a starting daemon never finds a partial folder and does not wait.
        disk.rename(folder, gone)
    finally:
        os.close(lock)
    disk.remove_tree(gone)
    return True


def sweep(tmpfs: Path = TMPFS, kept_days: float = SHADOW_KEPT_DAYS) -> None:
    """Remove all provably stale shadows, and those unused for ``kept_days``, and log each. Failures to remove a shadow
    are logged, not raised.
    """
    remove_halves(tmpfs)
    for left in find_stale(tmpfs):
        with _logged(left.folder):
            if left.proved and remove(left):
                logger.info("removed the shadow %s (%.2f GB): %s", left.folder, left.nbytes / 1e9, left.reason)
    for found in find_all(tmpfs):
        with _logged(found.folder):
            if found.in_use:
                continue
            if found.unused_s is None:
                _mark_unused(found.folder)
            elif found.unused_s >= kept_days * DAY_S and remove_unused(found.folder, kept_days * DAY_S):
                what = "removed the shadow %s (%.2f GB): no daemon has used it for %.1f days"
                logger.info(what, found.folder, found.nbytes / 1e9, found.unused_s / DAY_S)


def remove_halves(tmpfs: Path = TMPFS) -> None:
    """Finish removals that a killed process started."""
    for half in tmpfs.glob(f"{_gone()}*"):
        with contextlib.suppress(OSError):
            if not half.is_symlink():
                disk.remove_tree(half)


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("could not remove the shadow %s, which no daemon uses: %s", folder, error)


def _folders(tmpfs: Path) -> Iterator[Path]:
    for folder in sorted(tmpfs.glob(f"{shadow_prefix()}*")):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid():
                yield folder


def _in_use(folder: Path) -> bool:
    """Whether a process has the shadow or its state folder locked. Raises OSError."""
    record = _read(folder / OWNER_NAME)
    state = record.get("state")
    waits = isinstance(state, str) and record.get("root") == _root() and is_in_use(Path(state))
    return waits or folder_locks.is_locked(folder)


def _unused_s(folder: Path) -> float | None:
    try:
        return max(0.0, time.time() - (folder / UNUSED_NAME).lstat().st_mtime)
    except FileNotFoundError:
        return None


def _mark_unused(folder: Path) -> int:
    """Mark the shadow as unused, and return its size in bytes; 0 if there is none or it is in use. Raises OSError."""
    try:
        lock = locked(folder)
    except LocalError:
        return 0
    try:
        fd = os.open(UNUSED_NAME, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=lock)
        try:
            os.utime(fd)
        finally:
            os.close(fd)
        return _size(folder)
    finally:
        os.close(lock)


def _gone() -> str:
    return f".{shadow_prefix()}gone-"


def _judge(folder: Path) -> tuple[bool, str] | None:
    """Return (whether the shadow is provably stale, reason), or None if it may be used again. Raises OSError."""
    record = _read(folder / OWNER_NAME)
    state, device = record.get("state"), record.get("device")
    if not isinstance(state, str) or not isinstance(device, int):
        return (
            False,
            "it does not name its state folder (shadows of version 0.1 do not); remove it if no state folder uses it",
        )
    if record.get("root") != _root():
        return None  # made in a container: its state folder has a different path here, or none
    home = Path(state)
    if home.is_dir():
        if home.stat().st_dev != device:
            return None  # a different file system is mounted there now
        claimed = _read(home / CLAIM_NAME)
        if claimed.get("id") == record.get("id") or not os.access(home, os.R_OK | os.X_OK):
            return None
        return True, f"its state folder {home} now has another shadow"
    above = next(p for p in home.parents if p.exists())
    if os.path.lexists(home) or above.stat().st_dev != device:
        return None
    return True, f"its state folder {home} is gone"


def _read(path: Path) -> dict[str, Any]:
    """Read a small JSON object from a file owned by this user; empty if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        private_folders.check_file(fd, path)
        found = json.loads(os.read(fd, MAX_RECORD_BYTES))
    except (OSError, ValueError, LocalError):
        return {}
    finally:
        os.close(fd)
    return found if isinstance(found, dict) else {}


def _root() -> list[int]:
    """The identity of this process's root file system; a container's differs from its host's."""
    found = Path("/").stat()
    return [found.st_dev, found.st_ino]


def _size(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes += path.lstat().st_blocks * 512
    return sizes
