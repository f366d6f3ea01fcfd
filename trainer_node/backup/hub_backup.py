"""Backs up a hub's state folder while the hub publishes.

Published steps and the commit's target are copied first, then artifacts, then used version numbers and the rest. So the
copy is a state that a crash of the hub could have left. It lists no published version that it does not contain, and the
number of every artifact in it counts as used.

A restored hub continues on a branch above all those that the backup knows, so it never reuses a version number from
after the backup for different bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2pcast.files import disk
from p2pcast.files.append_log import AppendLog
from p2pcast.files.atomic_files import atomic_folder, explained
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.inspection.store_inspection import Item, survey
from p2pcast.store.state_format import check as check_format
from trainer_node.backup.backup_folder import (
    HUB,
    RESTORED,
    Backup,
    copy_file,
    copy_folder,
    restore_files,
    top_files,
)
from trainer_node.publish.version_numbers import FILE as NUMBERS
from trainer_node.publish.version_numbers import VersionNumbers

FIRST = ("run.key", "hub.json", "published.log")
LAST = ("trust.json", "evictions.log")
"""Copied in this order: evictions may be newer than tokens, never older."""
MADE_ANEW = ("daemon.json", "shadow.json", "lock")
PASSES = 20
"""Retention may remove files while they are copied; the copy is then repeated, up to this often."""


def copy_hub(state: Path, to: Path) -> dict[str, Any]:
    """Copy the hub's state, and return the facts for the backup's document. Raises LocalError or UsageError."""
    check_format(state)
    if not (state / "run.key").is_file():
        raise UsageError(f"{state} is not the state folder of a hub: it has no run.key")
    for name in FIRST:
        copy_file(state / name, to / name)
    for _ in range(PASSES):
        if _copy_artifacts(state, to) and _leads_to_newest(survey(to).items):
            break
    else:
        raise LocalError(
            f"{state}: artifacts are removed faster than they can be copied: raise `seed --keep-deltas` and"
            " `--keep-anchors`, or stop the hub for the backup"
        )
    rest = top_files(state, (*FIRST, *LAST, *MADE_ANEW))
    for path in (*rest, *(state / name for name in LAST)):
        copy_file(path, to / path.name)
    found = survey(to)
    return {"run": found.run, "version": None if found.newest is None else str(found.newest)}


def _copy_artifacts(state: Path, to: Path) -> bool:
    """Copy the artifacts that the copy does not have yet. Returns False if one was removed meanwhile. A name's contents
    never change, except that an anchor may be replaced by an equal one.
    """
    complete = True
    for path in _artifacts(state):
        target = to / path.relative_to(state)
        if not target.exists():
            copy = copy_folder if path.is_dir() else copy_file
            complete = copy(path, target) and complete
    for name in ("deltas", "anchors", "files"):
        with explained("create", to / name):
            disk.make_folder(to / name)
    return complete


def _artifacts(state: Path) -> Iterator[Path]:
    for folder in ("deltas", "anchors", "files"):
        with explained("read", state / folder):
            names = sorted((state / folder).iterdir()) if (state / folder).is_dir() else []
        yield from (path for path in names if not path.name.startswith("."))


def _leads_to_newest(items: list[Item]) -> bool:
    """Whether an anchor and deltas lead to the newest version."""
    whole = [item for item in items if item.version is not None]
    if not whole:
        return True
    reached = {item.version for item in whole if item.base is None}
    for item in sorted(whole, key=lambda item: item.version or Version(0, 0)):
        if item.base in reached:
            reached.add(item.version)
    return max(item.version for item in whole if item.version is not None) in reached


def restore_hub(backup: Backup, state: Path, branch: int | None) -> int:
    """Write the hub's state to a new folder, and return the branch of its next version. That is ``branch``, or one
    above all branches that the backup knows if that is higher. Raises LocalError or UsageError.
    """
    restored = AppendLog(backup.root / RESTORED)
    given = [int(record["branch"]) for record in restored.records]
    with atomic_folder(state) as part:
        restore_files(backup, HUB, part)
        for name in ("deltas", "anchors", "files"):
            disk.make_folder(part / name)
        newest = survey(part).newest
        # Numbers that were reserved at an earlier start count as used, whatever the boot.
        numbers = VersionNumbers(part / NUMBERS, "")
        known = [version.branch for version in (newest, numbers.used) if version is not None]
        floor = max([0, numbers.floor - 1, *known, *given])
        if branch is not None and branch <= floor:
            raise UsageError(f"--branch: this run has had branch {floor}: name a higher one")
        numbers.above(floor if branch is None else branch - 1)
        found = numbers.floor
        numbers.close()
        restored.append({"branch": found})
    restored.close()
    return found


def is_new(folder: Path) -> bool:
    """Whether a state may be restored to this folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
