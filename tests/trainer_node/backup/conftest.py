"""Fixtures: a ledger's state folder on either database, and a hub's with signed artifacts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer_node.backup.artifacts import HubState
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.postgresql_cluster import Cluster, postgresql
from trainer_node.ledger.database.ledger_store import LedgerStore

SEGMENT_BYTES = 2048
"""Small, so that a few results fill one."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with postgresql() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest) -> Callable[[], str | None]:
    """URL of an empty database; None for SQLite."""
    if request.param == "sqlite":
        return lambda: None
    return request.getfixturevalue("cluster").database  # type: ignore[no-any-return]


@pytest.fixture
def database(new_database: Callable[[], str | None]) -> str | None:
    return new_database()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    folder.mkdir(mode=0o700)
    (folder / "http.key").write_bytes(b"k" * 32)
    return folder


@pytest.fixture
def game(state: Path, database: str | None) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(state, database, segment_bytes=SEGMENT_BYTES))
    yield made
    made.ledger.close()


@pytest.fixture
def hub(tmp_path: Path) -> HubState:
    return HubState(tmp_path / "hub")
