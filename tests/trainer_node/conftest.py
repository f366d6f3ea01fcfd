from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # parts

from parts import Background, Encoder


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    found = Background()
    yield found
    await found.end()


@pytest.fixture
async def encoder(tmp_path: Path, background: Background) -> AsyncIterator[Encoder]:
    found = Encoder(tmp_path, background)
    yield found
    await found.close()
