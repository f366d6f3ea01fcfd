"""Fixtures: a ledger's daemon, and an engine of 16 tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "rollout_node" / "vllm")]

from ledger_stage import Up, running

from tests.support.fake_engine import engine
from tests.trainer_node.ledger.postgresql_cluster import postgresql

__all__ = ["engine"]


@pytest.fixture
def up() -> Up:
    return running


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """URL of the ledger's database; None: SQLite in its state folder."""
    if request.param == "sqlite":
        yield None
        return
    with postgresql() as cluster:
        yield cluster.database()
