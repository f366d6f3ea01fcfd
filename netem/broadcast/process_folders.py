"""Folders named after the process that uses them, so that a later process can remove the folders of killed ones."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PREFIX = "p2pcast-broadcast-"


@contextlib.contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """A new folder below ``root``, removed at the end of the block; at most one below a root. Folders of dead processes
    are removed first, as is a folder of an earlier process with the same id: a restarted container reuses its first
    process ids.
    """
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
