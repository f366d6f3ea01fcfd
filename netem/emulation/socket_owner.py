"""Finds the process of this run that has dialled a loopback connection, from the kernel's tables. Needed for encrypted
connections, whose content does not show the sender.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TABLE = Path("/proc/net/tcp")
LOOPBACK = "0100007F"
"""127.0.0.1 as the table shows it on a little-endian machine."""


def dialler(port: int, to: int, pids: Mapping[str, int]) -> str | None:
    """The one of ``pids`` (name → process) whose socket leads from 127.0.0.1:``port`` to 127.0.0.1:``to``; None for
    another process's socket, or a closed one.
    """
    inode = _inode(f"{LOOPBACK}:{port:04X}", f"{LOOPBACK}:{to:04X}")
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    return next((name for name, pid in pids.items() if _holds(pid, wanted)), None)


def _inode(ours: str, theirs: str) -> str | None:
    for line in TABLE.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == ours and fields[2] == theirs:
            return fields[9]
    return None


def _holds(pid: int, wanted: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(_target(f"{folder}/{name}") == wanted for name in os.listdir(folder))
    except OSError:
        return False


def _target(path: str) -> str:
    """Empty for a descriptor that was closed meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
