"""Fixtures: the wheel, and its environment. All test processes of one run share them."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # built_wheel, interpreters, …

from built_wheel import build, environment


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``wheel/NAME.whl`` and an environment in ``environment``."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built-wheel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            environment(build(folder), folder / "environment")
            (folder / "complete").touch()
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    [found] = (built / "wheel").glob("*.whl")
    return found


@pytest.fixture(scope="session")
def python(built: Path) -> Path:
    """The interpreter of the wheel's environment; ``p2pcast`` lies beside."""
    return built / "environment" / "bin" / "python"
