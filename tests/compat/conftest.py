"""Fixtures: the previous release as a user has it, built once per session, and a folder for processes of both
releases.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # previous, history

from previous import Releases, installed


@pytest.fixture(scope="session")
def previous_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("previous"))


@pytest.fixture
def releases(previous_site: Path, tmp_path: Path) -> Iterator[Releases]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as shadows:
        made = Releases(previous_site, tmp_path, Path(shadows))
        yield made
        made.end()
