"""Which process of ours has dialled a connection on loopback, by the kernel's own tables: what nobody can read off a connection that is encrypted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TABLE = Path("/proc/net/tcp")
LOOPBACK = "0100007F"
"""127.0.0.1 as the table writes it on a little-endian machine."""


def dialler(port: int, to: int, pids: Mapping[str, int]) -> str | None:
    """Of ``pids`` (name → process) the one whose socket goes from 127.0.0.1:``port`` to 127.0.0.1:``to``; None where it is nobody's of them, or gone."""
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
    """Empty where it is closed by now."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
