"""Processes that are not children of the test: their ids, and their ends."""

from __future__ import annotations

import os
import select
from pathlib import Path


def written_pid(file: Path) -> int | None:
    """The process id that another process writes to ``file``; None before. A file that is open for writing is empty."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text else None


def wait_for_end(pid: int) -> None:
    """Return when the process has ended; the test's own time limit ends the wait. A killed process takes a moment to
    end, longer on a busy machine.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)
