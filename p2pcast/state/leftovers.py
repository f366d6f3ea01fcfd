"""Which state folder a shadow belongs to, and the shadows in tmpfs that no daemon will open again.

A shadow survives its process on purpose: the next start with the same state folder goes on with it. So each shadow folder names its state folder
(``owner.json``), and each state folder names its shadow (``shadow.json``); both hold the same random id.

Promise: ``remove`` takes away a folder only if it belongs to this user, no process has it locked, and its record proves that it is left over: the state
folder is gone from a file system that is still there, or names another shadow by now. A folder without a record is listed and left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.daemon import TMPFS, shadow_prefix
from p2pcast.errors import LocalError
from p2pcast.limits import KIB
from p2pcast.state.shadow import locked
from p2pcast.store import disk, private
from p2pcast.store.files import atomic_write

logger = logging.getLogger(__name__)

OWNER_NAME = "owner.json"
"""In the shadow's folder."""
CLAIM_NAME = "shadow.json"
"""In the state folder."""
MAX_RECORD_BYTES = 16 * KIB
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Leftover:
    """``proved``: nobody will open the folder again. ``why``: for a person."""

    folder: Path
    nbytes: int
    proved: bool
    why: str


def claim(state: Path, shadow: Path) -> None:
    """Make ``shadow`` the shadow folder of ``state``, which this process has locked. Raises LocalError: the folder is in use, or not this user's alone."""
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
    finally:
        os.close(lock)


def leftovers(tmpfs: Path = TMPFS) -> Iterator[Leftover]:
    """This user's folders below ``tmpfs`` that no state folder, as far as can be seen, will use again."""
    for folder in sorted(tmpfs.glob(f"{shadow_prefix()}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            if (found := _judged(folder)) is not None:
                proved, why = found
                yield Leftover(folder, _size(folder), proved, why)


def remove(left: Leftover) -> bool:
    """Whether it was removed: not without proof, nor while a process has it locked."""
    try:
        lock = locked(left.folder)
    except LocalError:
        return False
    try:
        found = _judged(left.folder)  # as it is now that nobody else can claim it
        if found is None or not found[0]:
            return False
        gone = left.folder.with_name(f"{_gone()}{secrets.token_hex(ID_BYTES)}")
        # Rename before deleting, so that a daemon that comes now finds no half of a folder, and does not wait for the rest.
        disk.rename(left.folder, gone)
    finally:
        os.close(lock)
    disk.remove_tree(gone)
    return True


def sweep(tmpfs: Path = TMPFS) -> None:
    """Remove what is proved to be left over, and say so. Never raises for what cannot be removed."""
    for half in tmpfs.glob(f"{_gone()}*"):
        with contextlib.suppress(OSError):
            if not half.is_symlink():
                disk.remove_tree(half)
    for left in leftovers(tmpfs):
        try:
            if left.proved and remove(left):
                logger.info("removed the shadow %s (%.2f GB): %s", left.folder, left.nbytes / 1e9, left.why)
        except OSError as error:
            logger.warning("could not remove the shadow %s, whose state folder is gone: %s", left.folder, error)


def _gone() -> str:
    return f".{shadow_prefix()}gone-"


def _judged(folder: Path) -> tuple[bool, str] | None:
    """Whether it is proved to be left over, and why; None for a shadow that may be used again. Raises OSError."""
    record = _read(folder / OWNER_NAME)
    state, device = record.get("state"), record.get("device")
    if not isinstance(state, str) or not isinstance(device, int):
        return (
            False,
            "it does not name its state folder (version 0.1 made such shadows); remove it if none of your state folders uses it",
        )
    if record.get("root") != _root():
        return None  # a container's: its state folder has another path here, or none
    home = Path(state)
    if home.is_dir():
        if home.stat().st_dev != device:
            return None  # another file system is mounted there for now
        claimed = _read(home / CLAIM_NAME)
        if claimed.get("id") == record.get("id") or not os.access(home, os.R_OK | os.X_OK):
            return None
        return True, f"its state folder {home} has another shadow by now"
    above = next(p for p in home.parents if p.exists())
    if os.path.lexists(home) or above.stat().st_dev != device:
        return None
    return True, f"its state folder {home} is gone"


def _read(path: Path) -> dict[str, Any]:
    """A small JSON object of this user's; empty where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        private.check_file(fd, path)
        found = json.loads(os.read(fd, MAX_RECORD_BYTES))
    except (OSError, ValueError, LocalError):
        return {}
    finally:
        os.close(fd)
    return found if isinstance(found, dict) else {}


def _root() -> list[int]:
    """Which file system's paths this process sees: a container has another than its host."""
    found = Path("/").stat()
    return [found.st_dev, found.st_ino]


def _size(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes += path.lstat().st_blocks * 512
    return sizes
