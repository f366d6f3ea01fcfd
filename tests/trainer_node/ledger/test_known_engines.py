"""Leases of engines whose version the hub knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.scheduling.served_versions import KnownEngine

Made = Callable[..., Game]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes a game whose learner is at step 1, with versions 0.0 and 0.1."""
    games: list[Game] = []

    def make(**words: object) -> Game:
        game = Game(lambda: LedgerStore(tmp_path), **words)  # type: ignore[arg-type]
        games.append(game)
        game.whole_step(game.join("first"))
        return game

    yield make
    for game in games:
        game.ledger.close()


def lease(
    game: Game, session: bytes, stated: int, known: int | None, slots: int = 32, staged: tuple[int, int] | None = None
) -> list[Leased]:
    """``stated`` by the worker, ``known`` to the hub: steps of versions. ``staged``: likewise, of staged versions."""
    version = Version(0, stated)
    mine, hubs = (None, None) if staged is None else (Version(0, one) for one in staged)
    engine = KnownEngine(None if known is None else Version(0, known), hubs)
    return game.ledger.grant(session, slots, version, manifest(version), mine, engine).leases


def served(game: Game, name: str = "a") -> str | None:
    (found,) = [row["served"] for row in game.ledger.workers() if row["name"] == name]
    return found  # type: ignore[no-any-return]


def test_an_engine_gets_no_credit_for_a_version_beyond_its_own(made: Made) -> None:
    game = made(staleness=0)
    session = game.join("a", slots=32)
    game.add(4)
    assert lease(game, session, stated=1, known=0) == [], "version 0.0 is stale"
    assert served(game) == "0.0"
    assert len(lease(game, session, stated=1, known=1)) == 6
    assert served(game) == "0.1"


@pytest.mark.parametrize(("stated", "known"), [(1, 0), (0, 1)])
def test_the_older_version_sets_the_pace(made: Made, stated: int, known: int) -> None:
    game = made(staleness=1)
    session = game.join("a", slots=32)
    game.add(8)
    assert len(lease(game, session, stated, known)) == 1 * 2 * 3, "one batch of two groups of three"
    assert len(lease(game, session, 1, 1)) == 1 * 2 * 3, "another batch"


def test_an_unpublished_version_is_not_believed(made: Made) -> None:
    game = made()
    session = game.join("a")
    game.add(4)
    assert lease(game, session, stated=2, known=2) == []
    assert lease(game, session, stated=2, known=1) == []
    assert lease(game, session, stated=1, known=2) != []


def test_an_engine_without_weights_gets_nothing(made: Made) -> None:
    game = made()
    session = game.join("a")
    game.add(4)
    assert lease(game, session, stated=1, known=None) == []
    assert served(game) is None
    assert lease(game, session, stated=1, known=1) != []


@pytest.mark.parametrize(("stated", "known"), [(1, 0), (0, 1)])
def test_a_job_for_one_version_needs_agreement(made: Made, stated: int, known: int) -> None:
    """The result of another version would be rejected."""
    strict = made(rule="strict")
    session = strict.join("a")
    strict.add(4)
    assert lease(strict, session, stated, known) == []
    found = lease(strict, session, 1, 1)
    assert {one.job.oldest for one in found} == {Version(0, 1)}


@pytest.mark.parametrize(("stated", "known", "jobs"), [(1, 0, 0), (0, 1, 0), (0, 0, 3)])
def test_an_evaluation_needs_agreement(made: Made, stated: int, known: int, jobs: int) -> None:
    game = made(last_step=1)
    session = game.join("a")
    game.add(1, purpose="evaluate", pinned=Version(0, 0))
    assert len(lease(game, session, stated, known)) == jobs


def test_a_staged_version_counts_only_as_the_hub_knows(made: Made) -> None:
    game = made(rule="strict")
    session = game.join("a")
    name = next(row["worker"] for row in game.ledger.workers() if row["name"] == "a")
    lease(game, session, 0, 0, staged=(1, 0))
    assert game.ledger._rates.staged(name) == Version(0, 0)
    lease(game, session, 0, 0, staged=(1, 1))
    assert game.ledger._rates.staged(name) == Version(0, 1)


def test_other_bytes_than_the_versions_are_refused_all_the_same(made: Made) -> None:
    game = made()
    session = game.join("a")
    one = Version(0, 1)
    with pytest.raises(RefusedError, match="another manifest"):
        game.ledger.grant(session, 1, one, bytes(32), None, KnownEngine(Version(0, 0), None))
