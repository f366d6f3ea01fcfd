"""Folders of real models' versions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored_run import Run, state_of

sys.path.append(str(Path(__file__).parent))  # real_server


@pytest.fixture
def read_state() -> Any:
    return state_of


@pytest.fixture(scope="session")
def read_versions() -> Any:
    """Folders of a model's versions: 0.0, and those that successive ``step`` calls make."""

    def read(model: Path, folder: Path, step: Callable[[Run], Any], count: int) -> list[Path]:
        run = Run(folder / "versions", *state_of(model))
        found = []
        for number in range(count):
            found.append(run.save(model, folder / f"v{number}"))
            step(run)
        run.shadow.close()
        return found

    return read
