"""A PostgreSQL server of a measurement's own, from the programs of this machine, on a Unix socket alone.

Promises: it listens on no network; it ends, and its data goes, with the block. As root it runs as an unprivileged user,
because PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from p2pcast.ground.errors import UsageError

UNPRIVILEGED: Final = 65534
USER: Final = "bench"


def programs() -> Path | None:
    """Folder of the newest server's programs; None if no server is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).resolve().parent


def missing() -> str | None:
    """The missing requirement, or None."""
    return None if programs() is not None else "no PostgreSQL server is installed: apt-get install postgresql"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """URL of an empty database, until the end of the block. Raises UsageError."""
    found = programs()
    if found is None:
        raise UsageError(str(missing()))
    folder = Path(tempfile.mkdtemp(prefix="p2pcast-pg-", dir="/tmp"))
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        as_user = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []}
        os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)

    def call(program: str, *words: str) -> None:
        done = subprocess.run(
            [str(found / program), *words], check=False, capture_output=True, text=True, cwd="/", **as_user
        )
        if done.returncode:
            raise UsageError(f"{program} failed: {done.stderr.strip()[-300:]}")

    data = str(folder / "data")
    try:
        call("initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8")
        settings = f"-k {folder} -c listen_addresses=''"
        call("pg_ctl", "-D", data, "-w", "-o", settings, "-l", f"{folder}/log", "start")
        try:
            call("createdb", "-h", str(folder), "-U", USER, USER)
            yield f"postgresql://{USER}@/{USER}?host={folder}"
        finally:
            with contextlib.suppress(UsageError):
                call("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
