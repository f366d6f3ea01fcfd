"""Backs up and restores hub and ledger together.

The ledger is copied before the hub. A ledger learns from the hub about versions that it does not have, but a hub cannot
make versions that only the ledger knows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.files.atomic_files import atomic_folder, atomic_write
from p2pcast.ground.errors import UsageError
from p2pcast.ground.release import RELEASE
from trainer_node.backup.backup_folder import DOCUMENT, HUB, LEDGER, Backup, document, opened
from trainer_node.backup.hub_backup import copy_hub, is_new, restore_hub
from trainer_node.backup.ledger_backup import copy_ledger, restore_ledger


@dataclass(frozen=True, slots=True)
class Restored:
    """``branch``: of the hub's next version. ``dropped``: groups that were dropped. None if a part was not restored."""

    branch: int | None
    dropped: int | None


def make(to: Path, hub: Path | None, ledger: Path | None, database: str | None) -> Backup:
    """Make a backup. Raises LocalError or UsageError."""
    _check_new(to)
    with atomic_folder(to) as part:
        of_ledger = None if ledger is None else copy_ledger(ledger, part / LEDGER, database)
        of_hub = None if hub is None else copy_hub(hub, part / HUB)
        runs = {facts["run"] for facts in (of_hub, of_ledger) if facts is not None and facts["run"] is not None}
        if len(runs) > 1:
            raise UsageError(f"the ledger {ledger} is not of the run of the hub {hub}: name folders of one run")
        parts: dict[str, Any] = {HUB: of_hub, LEDGER: of_ledger}
        text = document(part, RELEASE, next(iter(runs), None), time.time(), parts)
        atomic_write(part / DOCUMENT, text)
    return opened(to)


def restored(
    source: Path, hub: Path | None, branch: int | None, ledger: Path | None, step: int, database: str | None
) -> Restored:
    """Restore the parts that have a new folder. ``branch``, ``step``: as for ``restore_hub`` and ``restore_ledger``.
    Raises LocalError, UsageError or IntegrityError.
    """
    backup = opened(source)
    for name, facts, state in ((HUB, backup.hub, hub), (LEDGER, backup.ledger, ledger)):
        if state is not None:
            if facts is None:
                raise UsageError(f"{source} has no state of a {name}: leave --{name} out")
            _check_new(state)
    backup.check()
    dropped = None if ledger is None else restore_ledger(backup, ledger, step, database)
    found = None if hub is None else restore_hub(backup, hub, branch)
    return Restored(found, dropped)


def _check_new(folder: Path) -> None:
    if not is_new(folder):
        raise UsageError(f"{folder} exists: name a new folder, or move that one away first")
