"""Tests of this folder import modules that lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outputs of a hub and two peers in a run of real processes, gathered once."""
    from gathering import gathered

    return gathered(tmp_path_factory.mktemp("run"))
