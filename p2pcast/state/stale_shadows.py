"""Which state folder a shadow belongs to, and which shadows in tmpfs no daemon will open again.

A shadow survives its process deliberately: the next start with the same state folder continues with it. So each shadow
folder names its state folder (``owner.json``), and each state folder names its shadow (``shadow.json``); both hold the
same random id.

Promise: ``remove`` removes a folder only if it belongs to this user, no process has it locked, and its record proves
that it is stale. A stale shadow's state folder is gone from a file system that is still mounted, or now names another
shadow. A folder without a record is listed and never removed.
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

from p2pcast.daemon.daemon_process import TMPFS, shadow_prefix
from p2pcast.errors import LocalError
from p2pcast.limits import KIB
from p2pcast.state.shadow import locked
from p2pcast.store import disk, private_folders
from p2pcast.store.atomic_files import atomic_write

logger = logging.getLogger("p2pcast.state")

OWNER_NAME = "owner.json"
"""Record in the shadow's folder."""
CLAIM_NAME = "shadow.json"
"""Record in the state folder."""
MAX_RECORD_BYTES = 16 * KIB
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class StaleShadow:
    """``proved``: no daemon will open the folder again. ``reason``: text for a person."""

    folder: Path
    nbytes: int
    proved: bool
    reason: str


def claim(state: Path, shadow: Path) -> None:
    """Make ``shadow`` the shadow folder of ``state``, which this process has locked.

    Raises LocalError: the folder is in use, or not this user's alone.
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
    finally:
        os.close(lock)


def find_stale(tmpfs: Path = TMPFS) -> Iterator[StaleShadow]:
    """This user's folders below ``tmpfs`` that no known state folder will use again."""
    for folder in sorted(tmpfs.glob(f"{shadow_prefix()}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            if (found := _judge(folder)) is not None:
                proved, reason = found
                yield StaleShadow(folder, _size(folder), proved, reason)


def remove(left: StaleShadow) -> bool:
    """Remove a stale shadow; returns whether it was removed. Requires proof, and that no process has the folder
    locked.
    """
    try:
        lock = locked(left.folder)
    except LocalError:
        return False
    try:
        found = _judge(left.folder)  # judge again under the lock
        if found is None or not found[0]:
            return False
        gone = left.folder.with_name(f"{_gone()}{secrets.token_hex(ID_BYTES)}")
        # Rename before deleting, so that a starting daemon never finds a partial folder and does not wait.
        disk.rename(left.folder, gone)
    finally:
        os.close(lock)
    disk.remove_tree(gone)
    return True


def sweep(tmpfs: Path = TMPFS) -> None:
    """Remove all proved stale shadows and log each. A shadow that can't be removed is logged; no exception is
    raised.
    """
    for half in tmpfs.glob(f"{_gone()}*"):
        with contextlib.suppress(OSError):
            if not half.is_symlink():
                disk.remove_tree(half)
    for left in find_stale(tmpfs):
        try:
            if left.proved and remove(left):
                logger.info("removed the shadow %s (%.2f GB): %s", left.folder, left.nbytes / 1e9, left.reason)
        except OSError as error:
            logger.warning("could not remove the shadow %s, whose state folder is gone: %s", left.folder, error)


def _gone() -> str:
    return f".{shadow_prefix()}gone-"


def _judge(folder: Path) -> tuple[bool, str] | None:
    """(whether the shadow is proved stale, reason); None for a shadow that may be used again. Raises OSError."""
    record = _read(folder / OWNER_NAME)
    state, device = record.get("state"), record.get("device")
    if not isinstance(state, str) or not isinstance(device, int):
        return (
            False,
            "it does not name its state folder (shadows of version 0.1 do not); remove it if no state folder uses it",
        )
    if record.get("root") != _root():
        return None  # made in a container: its state folder has another path here, or none
    home = Path(state)
    if home.is_dir():
        if home.stat().st_dev != device:
            return None  # another file system is mounted there now
        claimed = _read(home / CLAIM_NAME)
        if claimed.get("id") == record.get("id") or not os.access(home, os.R_OK | os.X_OK):
            return None
        return True, f"its state folder {home} now has another shadow"
    above = next(p for p in home.parents if p.exists())
    if os.path.lexists(home) or above.stat().st_dev != device:
        return None
    return True, f"its state folder {home} is gone"


def _read(path: Path) -> dict[str, Any]:
    """A small JSON object owned by this user; empty if there is none."""
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
    """Identity of this process's root file system: a container's differs from its host's."""
    found = Path("/").stat()
    return [found.st_dev, found.st_ino]


def _size(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes += path.lstat().st_blocks * 512
    return sizes
