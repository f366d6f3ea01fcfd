"""Waiting for the end of processes that are not children of the test."""

from __future__ import annotations

import os
import select


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
