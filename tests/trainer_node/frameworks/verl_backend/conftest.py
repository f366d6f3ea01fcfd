"""Folders and processes of a test with verl."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.fleet.processes import Processes


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path, Processes]]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs, Processes(tmp_path) as processes:
        yield tmp_path, Path(tmpfs), processes
