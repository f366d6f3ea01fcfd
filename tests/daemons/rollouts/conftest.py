"""Fixtures: a ledger's daemon, and an engine of 16 tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path += [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[2] / "rollout_node" / folder) for folder in ("worker", "vllm")),
]

from fake_engine import FakeEngine
from ledger_stage import END_S, Up, running

from tests.trainer_node.ledger.postgresql_cluster import postgresql


@pytest.fixture
def up() -> Up:
    return running


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    found = FakeEngine()
    await found.start()
    yield found
    async with asyncio.timeout(END_S):
        await found.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """URL of the ledger's database; None: SQLite in its state folder."""
    if request.param == "sqlite":
        yield None
        return
    with postgresql() as cluster:
        yield cluster.database()
