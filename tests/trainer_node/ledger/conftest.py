from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import check_counts, check_rows, dump
from tests.trainer_node.ledger.postgresql_cluster import Cluster, postgresql
from trainer_node.ledger.database.ledger_store import LedgerStore


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with postgresql() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], LedgerStore]:
    """Opens the same store each time, on either database."""
    database = None if request.param == "sqlite" else request.getfixturevalue("cluster").database()
    return lambda: LedgerStore(tmp_path / "state", database, segment_bytes=4096)


@pytest.fixture
def play(opened: Callable[[], LedgerStore]) -> Iterator[Callable[..., Game]]:
    """Games that end with a check of all rows and counts."""
    games: list[Game] = []

    def make(**terms: object) -> Game:
        games.append(Game(opened, **terms))  # type: ignore[arg-type]
        return games[-1]

    yield make
    for game in games:
        rows = dump(game.store)
        check_rows(rows)
        check_counts(rows, game.ledger)
        game.ledger.close()


@pytest.fixture
def game(play: Callable[..., Game]) -> Game:
    return play()
