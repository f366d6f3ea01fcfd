"""A PostgreSQL server of the tests' own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
"""PostgreSQL refuses to run as root."""


class Cluster:
    """A PostgreSQL server of its own, on a Unix socket alone. It ends with the process that started it."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self.folder = programs, folder
        self._as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._databases = 0
        if self._as_user:
            os.chown(folder, NOBODY, NOBODY)
        self._data = folder / "data"
        self.call("initdb", "-D", str(self._data), "-U", "ledger", "-A", "trust", "--no-sync", "-E", "UTF8")

    def call(self, program: str, *words: str) -> None:
        with open(self.folder.with_suffix(".log"), "ab") as log:
            subprocess.run(
                [str(self._programs / program), *words], check=True, stdout=log, stderr=log, cwd="/", **self._as_user
            )

    def start(self) -> None:
        words = ["-D", str(self._data), "-m", "immediate", "-w", "stop"]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            # The input of this process ends with `stop`, and with the death of the tests.
            self._stopping = subprocess.Popen(
                ["sh", "-c", 'cat && exec "$@"', "sh", str(self._programs / "pg_ctl"), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._as_user,
            )
        settings = f"-k {self.folder} -c listen_addresses=''"
        self.call("pg_ctl", "-D", str(self._data), "-w", "-o", settings, "-l", f"{self.folder}/log", "start")

    def stop(self) -> None:
        """Has no effect on a server that was stopped."""
        self._stopping.communicate()
        assert self._stopping.returncode == 0, self.folder.with_suffix(".log").read_text()

    def database(self) -> str:
        """URL of a new, empty database."""
        self._databases += 1
        name = f"ledger{self._databases}"
        self.call("createdb", "-h", str(self.folder), "-U", "ledger", name)
        return f"postgresql://ledger@/{name}?host={self.folder}"

    def end_connections(self, database: str) -> None:
        name = database.removeprefix("postgresql://ledger@/").partition("?")[0]
        end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        self.call("psql", "-h", str(self.folder), "-U", "ledger", "-d", "postgres", "-c", end)


def installed() -> Path:
    """The folder of PostgreSQL's programs. Skips the test if there is none."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("no PostgreSQL server: apt-get install postgresql")
    return programs[-1]


@contextlib.contextmanager
def postgresql() -> Iterator[Cluster]:
    """A server that runs until the end of the block."""
    programs = installed()
    folder = Path(tempfile.mkdtemp(prefix="p2pcast-pg-", dir="/tmp"))
    try:
        made = Cluster(programs, folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
