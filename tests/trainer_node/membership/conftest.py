from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # lettered_members, recorded_fleet

from recorded_fleet import Fleet


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet()
