from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer_node.ledger.postgresql_cluster import Cluster, postgresql
from trainer_node.ledger.database.ledger_store import Store


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with postgresql() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same store each time, on either database."""
    database = None if request.param == "sqlite" else request.getfixturevalue("cluster").database()
    return lambda: Store(tmp_path / "state", database, segment_bytes=4096)
