"""Locks (flock) on folders and files, which other processes may check.

Guarantee: a check never makes a different process's ``lock`` fail, because a check holds the lock only for a moment and
``lock`` retries for longer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final

TRY_S: Final = 0.5
_PAUSE_S: Final = 0.01


def lock(fd: int) -> None:
    """Lock the descriptor's file or folder exclusively. Raises OSError: EWOULDBLOCK if another process has it."""
    until = time.monotonic() + TRY_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE_S)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on this file or folder. Raises OSError, also if the path does not exist."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return True
    finally:
        os.close(fd)
    return False
