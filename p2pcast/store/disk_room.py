"""Checks whether a disk has free space again after a failed write."""

from __future__ import annotations

import os
from pathlib import Path

from p2pcast.files import disk
from p2pcast.files.atomic_files import explained, part_path
from p2pcast.ground.limits import MIB

ROOM_BYTES = MIB
"""A disk with less free space than this counts as full."""


def check_room(folder: Path, size: int = ROOM_BYTES) -> None:
    """Write a file of ``size`` bytes in ``folder`` and remove it. Blocks. Raises LocalError."""
    path = part_path(folder / "room")
    with explained("write to", folder):
        fd = disk.create(path, os.O_WRONLY | os.O_EXCL)
        try:
            disk.allocate(fd, path, 0, size)
            disk.sync(fd, path)
        finally:
            os.close(fd)
            disk.unlink(path, missing_ok=True)
