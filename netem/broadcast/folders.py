"""Folders of a process that may be killed: named after it, so that a later one can tell them from those still in use."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PREFIX = "p2pcast-broadcast-"


@contextlib.contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """A new one below ``root``, gone when the block is left; one at a time below one root. Those of dead processes are removed first, also of one that had this process's number:
    in a container that starts again the first processes get the same."""
    for path in root.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number == str(os.getpid()) or not Path(f"/proc/{number}").exists():
            shutil.rmtree(path, ignore_errors=True)
    folder = root / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
