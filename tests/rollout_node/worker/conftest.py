"""Tests of this folder import modules that lie beside them, and the tasks' samplers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "p2pcast" / "tasks")]

from tests.support.fake_engine import engine
from tests.support.memory_ledger import MemoryLedger

__all__ = ["engine"]
END_S = 600.0


@pytest.fixture
async def ledger() -> AsyncIterator[MemoryLedger]:
    found = MemoryLedger()
    await found.start()
    yield found
    async with asyncio.timeout(END_S):
        await found.stop()
